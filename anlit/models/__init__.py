"""The three architectures, one file each, over the skeleton in `decoder.py`."""

from anlit.models.angpt import AnGPT
from anlit.models.gpt import GPT
from anlit.models.ngpt import NGPT

__all__ = ["GPT", "NGPT", "AnGPT"]
