"""What becomes of a trained model: for now, weights that leave the run folder."""
