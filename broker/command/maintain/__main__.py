"""``python -m broker.command.maintain``: ``plainsong maintain``, as ``plainsong pipeline run maintain`` starts it."""

from __future__ import annotations

import sys

from broker.command.maintain.command import maintain
from plainsong.cli.main import run

if __name__ == "__main__":
    sys.exit(run(maintain, sys.argv[1:], "plainsong maintain"))
