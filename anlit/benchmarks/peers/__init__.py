"""Code for separate processes, partly with the Python of another environment. It imports nothing of anlit."""
