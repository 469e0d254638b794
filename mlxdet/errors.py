"""The two kinds of failure a user can meet, and the exit code each one has.

Anything else that escapes is a defect of mlxdet itself and keeps its traceback.
"""


class MlxdetError(Exception):
    """Base of every error meant for a user: one or two lines that say what, where and what to do."""

    exit_code = 2


class UsageError(MlxdetError):
    """Wrong usage or unreadable input: nothing was written. Exit code 2."""

    exit_code = 2


class Fault(MlxdetError):
    """Something was measured and does not hold, or training stopped on a fault. Exit code 1."""

    exit_code = 1
