"""Exceptions for errors that a user can correct."""


class UserError(ValueError):
    """Something in the user's command, configuration or data is wrong.

    The message is one sentence that names the key, the value and the fix; the command line prints
    it alone, without a traceback, and exits with `exit_code`.
    """

    exit_code = 2


class RunError(UserError):
    """A correctly configured run cannot continue, for example on a full disk. The message is as in `UserError`."""

    exit_code = 1
