"""Runs when a Python process of Spark starts, if this folder is on its PYTHONPATH; imports nothing of ours.

Spark puts a zip of pyspark first on the path of its Python processes. A zip has no compiled modules, so each process
compiles pyspark again, which takes more processor time than everything else before it connects to Spark; and Spark waits
ten seconds for that. This removes the zip where the package that it was made from is on the path as well.
"""

import sys
from contextlib import suppress
from pathlib import Path

_ZIP = Path("pyspark/python/lib/pyspark.zip")


def _is_installed(entry: str) -> bool:
    """True for the zip within an installed pyspark."""
    path = Path(entry)
    return path.parts[-4:] == _ZIP.parts and str(path.parents[3]) in sys.path


sys.path[:] = [entry for entry in sys.path if not _is_installed(entry) and Path(entry) != Path(__file__).parent]
# Python runs only the first module of this name, so run the one that it would have run.
_this = sys.modules.pop(__name__)
with suppress(ModuleNotFoundError):
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401
sys.modules.setdefault(__name__, _this)  # an import that leaves no module behind is an error
