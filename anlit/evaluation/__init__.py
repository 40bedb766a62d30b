"""What trained models do: commands that read checkpoints and write tables, plots and raw numbers."""
