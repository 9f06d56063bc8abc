"""What has to be installed where Spark's Python workers run, and is said clearly when it is not."""

from __future__ import annotations

import sys
from importlib.util import find_spec


class Lacking(ImportError):
    """Something is not installed for the interpreter that Spark's workers run with."""


def check_pyarrow() -> None:
    """Raises Lacking: there is no pyarrow, or Spark runs another interpreter than the one that has it."""
    if find_spec("pyarrow") is None:
        raise Lacking(
            f"Spark's Python workers run {sys.executable}, which has no pyarrow: install plainsong[spark] for it, or set "
            "PYSPARK_PYTHON to the interpreter that has it, before the session starts"
        )
