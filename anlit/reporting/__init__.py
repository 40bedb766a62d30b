"""How results are written: tables, pages, figures, files and their provenance.

Every other part of anlit may import this room; it imports nothing of them, and neither torch nor lightning.
"""
