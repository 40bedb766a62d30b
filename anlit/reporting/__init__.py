"""How results are written: tables, pages, figures, files and their provenance.

All other parts of anlit may import this package. It imports none of them, and neither torch nor lightning.
"""
