"""Comparisons and studies of run folders, without torch: they start at once and run where no model could."""
