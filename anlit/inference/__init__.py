"""Uses of a trained model: generating and scoring text, export and import, and a page in the browser."""
