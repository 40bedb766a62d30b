"""Output of results: tables, pages, figures and text.

All other packages of anlit may import this package. It imports neither torch nor lightning.
"""
