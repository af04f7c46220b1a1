"""The ways a command ends badly, and their exit codes."""


class BadInput(Exception):
    """The input or the flags cannot be used: exit code 2.

    The message is one paragraph that names the thing and the remedy.
    """

    exit_code = 2


class CheckFailed(Exception):
    """A comparison ran and did not hold: exit code 1."""

    exit_code = 1


class Unfinished(RuntimeError):
    """A process of the command crashed or ran out of time, so nothing is known: exit code 3.

    `summary` is one line for people; the whole message may hold tracebacks.
    """

    exit_code = 3

    def __init__(self, summary: str, details: str = "") -> None:
        super().__init__(details or summary)
        self.summary = summary
