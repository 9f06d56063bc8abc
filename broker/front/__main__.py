"""Starts a front end's process: deaf to Ctrl-C, which reaches all; the owning process tells it when to leave.

python -m broker.front NAME LINK DOOR LISTENER…      descriptors it inherits; nobody starts it by hand
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # before what takes most of a second to load
    from broker.front.child import run_front_end

    name, *numbers = sys.argv[1:]
    run_front_end(name, [int(number) for number in numbers])


if __name__ == "__main__":
    main()
