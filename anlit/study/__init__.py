"""`anlit study`: a YAML of arms, tuning grids and seeds becomes runs, and the runs a report.

It imports no torch: training happens in `anlit fit`, a process of its own per run.
"""
