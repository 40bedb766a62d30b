"""The exceptions for what a user can mend."""


class UserError(ValueError):
    """Something in the user's command, configuration or data is wrong.

    The message is one sentence that names the key, the value and the fix; the command line prints
    it alone, without a traceback, and exits with `exit_code`.
    """

    exit_code = 2


class RunError(UserError):
    """A run that was rightly configured cannot go on where it is, for instance on a full disk; the message as above."""

    exit_code = 1
