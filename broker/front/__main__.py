"""Starts a front end's process: deaf to Ctrl-C, which reaches all; it ends when its parent has ended.

A front end does not outlive the process that started it, not even one that is stopped, or lost in what it does.

It sees that end at its link, tells those who wait what it knows, and leaves. One that is stopped sees nothing, and would
keep its port; so the system is asked to let it go on when the other end of its door is closed, which the owning process
alone holds. (A signal at the death of a parent would come when just the thread ends that started us.)
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys

#: How long an orphan may take to leave, longer than any grace that is sensible; then its own alarm ends it.
ORPHAN_S = 120


def watch_parent(door: int) -> None:
    """Sees to it that this process ends when nobody holds the other end of ``door``, a descriptor of a socket.

    Raises:
      SystemExit: nobody does any more.
    """
    other_end = select.poll()
    other_end.register(door, 0)  # its closing is told in any case

    def go_on(number: int, frame: object) -> None:
        del number, frame
        if other_end.poll(0):
            signal.alarm(ORPHAN_S)

    signal.signal(signal.SIGCONT, go_on)
    if sys.platform == "linux":
        fcntl.fcntl(door, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(door, fcntl.F_SETSIG, int(signal.SIGCONT))
        fcntl.fcntl(door, fcntl.F_SETFL, fcntl.fcntl(door, fcntl.F_GETFL) | os.O_ASYNC)
    if other_end.poll(0):  # it ended before we asked
        sys.exit("whoever started this front end has ended")


# ---   main   --------------------------------------------------------------------------------------
#
# Starts a front end's process: deaf to Ctrl-C, which reaches all; the owning process tells it when to leave.
#
# python -m broker.front NAME LINK DOOR LISTENER… descriptors it inherits; nobody starts it by hand


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # before what takes most of a second to load
    name, link, door, *listeners = sys.argv[1:]
    watch_parent(int(door))
    from broker.front.child import run_front_end

    run_front_end(name, [int(number) for number in (link, door, *listeners)])


if __name__ == "__main__":
    main()
