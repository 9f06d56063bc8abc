"""Makes ``then.zip``: the store of version 0.1, whose races the schedules must find.

Run it in a clone with the full history: ``python -m tests.schedules.pack_then``. The code is unchanged except for the
names of its package, locks, queues and threads, which are replaced by those of the schedules.
"""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

#: The last commit before the set of volumes had a single writer.
COMMIT = "c2d06a2b"
PACKAGE = "storage_then"
#: Modules whose threads stay outside the schedule, because they only free the space of logs.
_UNSCHEDULED = ("shrinking.py", "background.py")
_SEAM = (
    ("import threading\n", "from tests.schedules import scheduler as threading\n"),
    (
        "from queue import Empty, SimpleQueue\n",
        "from queue import Empty\nfrom tests.schedules.scheduler import Queue as SimpleQueue\n",
    ),
    ("from queue import SimpleQueue\n", "from tests.schedules.scheduler import Queue as SimpleQueue\n"),
    ("from storage.loop import nap\n", "from tests.schedules.scheduler import nap\n"),
)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Write the archive next to this file."""
    names = _git("ls-tree", "--name-only", f"{COMMIT}:storage/leveldb").split()
    with zipfile.ZipFile(Path(__file__).with_name("then.zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            source = _git("show", f"{COMMIT}:storage/leveldb/{name}").replace("storage.leveldb", PACKAGE)
            if name not in _UNSCHEDULED:
                for old, new in _SEAM:
                    source = source.replace(old, new)
            # A fixed date, so that the same code gives the same file.
            archive.writestr(zipfile.ZipInfo(f"{PACKAGE}/{name}"), source, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()
