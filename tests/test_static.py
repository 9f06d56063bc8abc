"""Checks that do not run our code: format, lint, types, layers, and generated files, as in ``make static``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]


def commands() -> list[str]:
    """Return the commands of ``make static``, one per line."""
    made = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "static"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return made.stdout.splitlines()


@pytest.mark.parametrize("command", commands())
def test_the_tree_passes_the_static_checks(command: str) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=ROOT,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=5 * PATIENCE_S,
    )
    if ended.returncode:
        pytest.fail(f"{command}\n{ended.stdout}", pytrace=False)
