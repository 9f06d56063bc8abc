"""``python -m broker``: the same as ``plainsong serve``."""

from __future__ import annotations

import sys

from broker.command.serve import serve
from plainsong.cli.main import run

if __name__ == "__main__":
    sys.exit(run(serve, sys.argv[1:], "python -m broker"))
