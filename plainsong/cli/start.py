"""The program's entry point: handles Ctrl-C while its modules load, and loads them."""

from __future__ import annotations

from signal import SIGINT, default_int_handler, getsignal, signal

from plainsong.cli.quitting import quit_at_once


def main() -> None:
    """Runs the program and ends the process."""
    if getsignal(SIGINT) is default_int_handler:  # if it is ignored, it stays ignored
        signal(SIGINT, quit_at_once)
    from plainsong.cli.main import main as program

    program()
