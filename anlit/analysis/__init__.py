"""Reads run folders and compares them: convergence speed-up, plot, tables.

Nothing here imports torch or lightning, so that a comparison starts at once and runs where no
model could.
"""
