"""The code for exported folders. It needs torch and transformers but not anlit.

The files are copied unchanged, so they import each other by relative imports.
"""
