"""Each switch of ``bench.rent`` changes names that the code has. Only the figures show that a mechanism is off."""

from __future__ import annotations

import subprocess
import sys

from bench.rent import MECHANISMS, Side


def test_every_mechanism_can_be_switched_off():
    """Runs in a process of its own; it fails if the code's names have changed."""
    code = "from bench.rent import MECHANISMS\nfor each in MECHANISMS.values(): each.off()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_load_of_a_mechanism_has_a_known_name():
    kinds = {row.split(" ")[0] for mechanism in MECHANISMS.values() for row in mechanism.rows}
    assert kinds <= Side.KINDS
