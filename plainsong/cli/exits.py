"""How a command ends: its exit code, and the error that says so.

0    done
1    failed, and the error says why; or whoever read the output has gone
2    the command line or the settings are wrong; nothing was done
3    the store cannot be opened as it is; nothing was changed
4    there is no such topic, reader or context; nothing was done
5    no daemon answered, or it cannot serve this now; nothing was done: try again later
6    nobody knows whether it happened: look before you repeat it
130  interrupted (Ctrl-C)
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    STORE = 3
    NOT_FOUND = 4
    UNAVAILABLE = 5
    UNKNOWN = 6
    INTERRUPTED = 130


class CommandFailed(Exception):
    """Ends a command with one line ``error: …``, a line ``hint: …`` where there is one, and an exit code.

    Args:
      message: what went wrong, in one line; further lines are printed as they are.
      hint: what to do about it.
      code: of the process.
    """

    def __init__(self, message: str, *, hint: str = "", code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        #: The daemon's word for it, and whether it happened; for programs.
        self.word = ""
        self.outcome = ""
        self.more: dict[str, object] = {}
        self.as_json = False
