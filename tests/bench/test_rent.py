"""Each switch of ``bench.rent`` still switches a mechanism off."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.rent import MECHANISMS, Side


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_can_be_switched_off(name):
    """Runs in its own process; it fails if the code's names have changed."""
    code = "import sys; from bench.rent import MECHANISMS; MECHANISMS[sys.argv[1]].off()"
    subprocess.run([sys.executable, "-c", code, name], check=True)


def test_every_load_of_a_mechanism_has_a_known_name():
    kinds = {row.split(" ")[0] for mechanism in MECHANISMS.values() for row in mechanism.rows}
    assert kinds <= Side.KINDS
