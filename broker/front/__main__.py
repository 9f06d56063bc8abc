"""Starts a front end's process: deaf to Ctrl-C, which reaches all; the owning process tells it when to leave.

python -m broker.front NAME LINK DOOR LISTENER…      descriptors it inherits; nobody starts it by hand
"""

from __future__ import annotations

import signal
import sys

from broker.front.orphaned import end_with


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # before what takes most of a second to load
    name, link, door, *listeners = sys.argv[1:]
    end_with(int(door))
    from broker.front.child import run_front_end

    run_front_end(name, [int(number) for number in (link, door, *listeners)])


if __name__ == "__main__":
    main()
