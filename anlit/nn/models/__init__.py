"""The three architectures, one file each, over the skeleton in `decoder.py`."""
