"""Starts a front end's process, which ignores Ctrl-C and ends when its parent has ended.

A front end notices that end by its link, answers what it can, and leaves. One that is stopped (SIGSTOP) would notice
nothing and keep its port. So it has the kernel send SIGCONT when the other end of the handover socket closes, which the
owning process alone holds. (PR_SET_PDEATHSIG would not do: it fires when the thread ends that started the process.)

    python -m broker.front NAME LINK HANDOVER LISTENER…     descriptors that it inherits; the daemon starts it
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import sys

#: How long it may take to leave without its parent, longer than any sensible grace; then its alarm ends it.
LEAVE_S = 120


def watch_parent(handover: int) -> None:
    """Makes this process end after the other end of ``handover``, a socket's descriptor, has closed.

    Raises:
      SystemExit: it is closed already.
    """
    other_end = select.poll()
    other_end.register(handover, 0)  # closing is reported in any case

    def on_continue(number: int, frame: object) -> None:
        del number, frame
        if other_end.poll(0):
            signal.alarm(LEAVE_S)

    signal.signal(signal.SIGCONT, on_continue)
    if sys.platform == "linux":
        fcntl.fcntl(handover, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(handover, fcntl.F_SETSIG, int(signal.SIGCONT))
        fcntl.fcntl(handover, fcntl.F_SETFL, fcntl.fcntl(handover, fcntl.F_GETFL) | os.O_ASYNC)
    if other_end.poll(0):  # it ended before the signal was set up
        sys.exit("the process that started this front end has ended")


def main() -> None:
    """Runs the process."""
    # Ctrl-C reaches the whole process group, and the parent says when to leave. First, since loading takes a second.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, link, handover, *listeners = sys.argv[1:]
    watch_parent(int(handover))
    gc.disable()  # what is loaded is no garbage
    from broker.front.child import run_front_end

    gc.freeze()
    gc.enable()
    run_front_end(name, [int(number) for number in (link, handover, *listeners)])
    gc.freeze()


if __name__ == "__main__":
    main()
