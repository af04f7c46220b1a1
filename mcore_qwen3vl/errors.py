"""The two ways a command ends badly, and their exit codes."""


class BadInput(Exception):
    """The input or the flags cannot be used: exit code 2.

    The message is one paragraph that names the thing and the remedy.
    """

    exit_code = 2


class CheckFailed(Exception):
    """A comparison ran and did not hold: exit code 1."""

    exit_code = 1
