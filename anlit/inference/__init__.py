"""Uses of a trained model: generating and scoring text, export and import."""
