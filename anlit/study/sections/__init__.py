"""The sections of a study's report, one file each; `registry.py` lists them with their options."""
