"""Python's garbage collector rests while libraries are imported."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Import libraries without a search for garbage.

    The objects of Torch and Lightning stay, and the collector visits them again and again. Searches
    after the import leave them out (docs/reference/startup.md).
    """
    if "torch" in sys.modules:  # in a notebook or a test there is more than imported modules
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # Triton complains about objects that the end does not free
