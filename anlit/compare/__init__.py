"""Comparisons of run folders, without torch: they start at once, also where no model could run."""
