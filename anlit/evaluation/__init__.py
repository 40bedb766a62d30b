"""Evaluation of trained models: generation, scoring, and reports on checkpoints."""
