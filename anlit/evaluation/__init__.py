"""Evaluation of trained models: commands that read checkpoints and write tables, plots and raw numbers."""
