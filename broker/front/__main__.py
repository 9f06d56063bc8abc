"""Starts a front end's process, which ignores Ctrl-C and ends when its parent has ended.

A front end detects that end on its link, completes its answers, and exits. One that is stopped (SIGSTOP) would detect
nothing and keep its port. So the kernel sends it SIGCONT when the other end of the handover socket closes, which only
the owning process holds. (PR_SET_PDEATHSIG is unsuitable: it fires when the thread that started the process ends.)

    python -m broker.front NAME LINK HANDOVER LISTENER…     descriptors that it inherits; the daemon starts it
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import sys

#: How long it may take to exit after its parent: longer than any sensible grace period. Then an alarm ends it.
LEAVE_S = 120


def watch_parent(handover: int) -> None:
    """Make this process end after the other end of ``handover``, a socket's descriptor, has closed.

    Raises:
      SystemExit: it has closed already.
    """
    other_end = select.poll()
    other_end.register(handover, 0)  # a hang-up is always reported

    def on_continue(number: int, frame: object) -> None:
        del number, frame
        if other_end.poll(0):
            signal.alarm(LEAVE_S)

    signal.signal(signal.SIGCONT, on_continue)
    if sys.platform == "linux":
        fcntl.fcntl(handover, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(handover, fcntl.F_SETSIG, int(signal.SIGCONT))
        fcntl.fcntl(handover, fcntl.F_SETFL, fcntl.fcntl(handover, fcntl.F_GETFL) | os.O_ASYNC)
    if other_end.poll(0):  # it closed before the signal was set up
        sys.exit("the process that started this front end has ended")


def main() -> None:
    """Run the process."""
    # Ctrl-C reaches the whole process group, but the parent decides when to exit. This comes first, since loading takes
    # a second.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, link, handover, *listeners = sys.argv[1:]
    watch_parent(int(handover))
    gc.disable()  # modules stay in memory
    from broker.front.child import run_front_end

    gc.freeze()
    gc.enable()
    run_front_end(name, [int(number) for number in (link, handover, *listeners)])
    gc.freeze()


if __name__ == "__main__":
    main()
