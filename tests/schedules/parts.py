"""The rows of docs/design.md's table "Who writes what", and the threads of a schedule that took part in each row.

The names are the table's. Each row lists the methods that its writers and readers call. It is covered if more than one
thread has called one of its methods.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from storage.leveldb.commit import Committer
from storage.leveldb.group_commit import GroupCommit
from storage.leveldb.keeper import Keeper
from storage.leveldb.listed_volumes import ListedVolumes
from storage.leveldb.metadata import Metadata
from storage.leveldb.open_databases import OpenDatabases
from storage.leveldb.sealed_rows import SealedRows
from storage.leveldb.view import PinnedView
from storage.leveldb.volume import Volume
from storage.leveldb.volume_set import Sets
from storage.replication.outbox import Outbox
from tests.schedules import scheduler as sched

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"

#: Methods of a row's writers and readers, by the row's first words.
PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "set of volumes": ((Sets, "put"), (Sets, "pin"), (Sets, "unpin")),
    "newest volume": ((Committer, "_write_batch"), (OpenDatabases, "lease")),
    "sealed volumes": ((SealedRows, "change"), (Keeper, "note_dead"), (OpenDatabases, "lease")),
    "a volume as it is sealed": ((Keeper, "finish"), (Keeper, "_finish")),
    "LIST, the next volume": ((ListedVolumes, "_write_list"), (Keeper, "spare")),
    "indexes of sealed volumes": ((Volume, "write_index"),),
    "metadata in memory": ((Metadata, "apply"), (Metadata, "checkpoint"), (Metadata, "rows")),
    "metadata's database": ((Metadata, "checkpoint"), (Metadata, "rows")),
    "open databases": ((OpenDatabases, "acquire"), (OpenDatabases, "release"), (OpenDatabases, "discard")),
    "a view": ((PinnedView, "add_snapshot"), (PinnedView, "rows_of"), (PinnedView, "end"), (PinnedView, "close")),
    "works on their way": ((GroupCommit, "begin"), (GroupCommit, "_report"), (GroupCommit, "_deliver")),
    "commits for the second copy": ((Outbox, "hand_over"), (Outbox, "take"), (Outbox, "progressed")),
}
#: Only the keeper writes these while a store is open; the other party is the next start.
AT_STARTS = {"indexes of sealed volumes"}


def rows_of_design() -> list[str]:
    """Return the table's structures whose code is in ``storage``: those above the daemon's log lines."""
    table = DESIGN.read_text("utf-8").partition("| structure | who writes |")[2].partition("\n\n")[0]
    names = [line.split("|")[1].strip() for line in table.splitlines()[2:] if line.startswith("|")]
    return [
        re.split(r"[(:]", name)[0].strip()
        for name in names[: next(at for at, n in enumerate(names) if "log lines" in n)]
    ]


@contextmanager
def noted() -> Iterator[dict[str, set[str]]]:
    """Record the threads that take part in each row, by the row's name."""
    found: dict[str, set[str]] = defaultdict(set)
    calls: dict[tuple[type, str], list[str]] = defaultdict(list)
    for name, methods in PARTS.items():
        for method in methods:
            calls[method].append(name)
    with ExitStack() as stack:
        for (owner, method), names in calls.items():
            stack.enter_context(mock.patch.object(owner, method, _noting(getattr(owner, method), names, found)))
        yield found


def _noting(real: Callable[..., Any], names: list[str], found: dict[str, set[str]]) -> Callable[..., Any]:
    def noting(*arguments: Any, **options: Any) -> Any:
        thread = sched.name_of_thread()
        if thread is not None:
            for name in names:
                found[name].add(thread)
        return real(*arguments, **options)

    return noting
