"""The code that goes into exported folders: it needs torch and transformers and nothing of anlit.

Each file is copied as it is, so the files import one another as neighbours.
"""
