"""`anlit study`: a YAML of arms, tuning grids and seeds becomes runs, and the runs a report.

plan.py lists the runs, launch.py starts them, state.py tells how each ended, results.py takes each arm's
best setting, report.py writes the page. Like all of `anlit.analysis` it imports no torch: training happens in
`anlit fit`, a process of its own per run.
"""
