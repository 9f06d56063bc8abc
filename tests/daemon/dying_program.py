"""The program ``plainsong``, which sends itself a signal at a chosen moment of its work.

An observer outside the process might stall at that moment, and then find the work done.

Arguments: the signal's number; ``says``, or the name of one of Python's audit events; a regular expression to search in
its output, or in an argument of the event; the number of the match that triggers; and the arguments of ``plainsong``.
"""

from __future__ import annotations

import os
import re
import sys
from itertools import count

from plainsong.cli import output
from plainsong.cli.main import main as plainsong


class Heard:
    """Standard error, with a callback for its output."""

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
        output.PROGRESS_EVERY_S = 0.0  # report progress each time, regardless of the clock
        sys.stderr = Heard(sys.stderr, tell)
    else:
        sys.addaudithook(audit)
    sys.argv = ["plainsong", *words]
    plainsong()


if __name__ == "__main__":
    main(*sys.argv[1:])
