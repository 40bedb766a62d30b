"""Messages that are logged once per process."""

import logging
from functools import cache


@cache
def say_once(logger: logging.Logger, message: str) -> None:
    """Log `message`, if `logger` has not had it before."""
    logger.info(message)
