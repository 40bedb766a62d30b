"""The networks in plain torch: layers, mechanisms, kernels, attention, models.

No Lightning, no files.
"""
