"""The one exception for what a user can mend."""


class UserError(ValueError):
    """Something in the user's command, configuration or data is wrong.

    The message is one sentence that names the key, the value and the fix; the command line prints
    it alone, without a traceback, and exits with a non-zero code.
    """
