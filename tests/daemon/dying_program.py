"""The program ``plainsong``, which sends a signal to itself at a moment of its work, without a last word.

Whoever looked for that moment from outside might stand still meanwhile, and find the work done.

Arguments: the signal's number; ``says``, or the name of one of Python's audit events; a regular expression that is found in
what it says, or in an argument of the event; how often it is until then; and those of ``plainsong``.
"""

from __future__ import annotations

import os
import re
import sys
from itertools import count

import broker.command.copy  # noqa: F401 - its module, by its whole name
from plainsong.cli.main import main as plainsong


class Heard:
    """Standard error, and who is told what is written to it."""

    def __init__(self, stream, tell):
        self._stream, self._tell = stream, tell

    def write(self, text):
        written = self._stream.write(text)
        self._stream.flush()
        self._tell(text)
        return written

    def __getattr__(self, name):
        return getattr(self._stream, name)


def main(number: str, event: str, pattern: str, times: str, *words: str) -> None:
    found = count(1)

    def tell(text):
        if re.search(pattern, text) and next(found) == int(times):
            os.kill(os.getpid(), int(number))

    def audit(name, arguments):
        if name == event:
            tell(" ".join(map(str, arguments)))

    if event == "says":
        sys.modules["broker.command.copy"].EVERY_S = 0.0  # how often it says something is no matter of time
        sys.stderr = Heard(sys.stderr, tell)
    else:
        sys.addaudithook(audit)
    sys.argv = ["plainsong", *words]
    plainsong()


if __name__ == "__main__":
    main(*sys.argv[1:])
