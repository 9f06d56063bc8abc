"""The embedded store: volumes of messages and a database of metadata, one synced batch for a group of commits.

Why nothing acknowledged is lost, and which module to read for it, from the bottom up:

1. ``engine``: one LevelDB. A synced batch survives whole, however the process or the machine ends; after a failed write
   nothing is written before the database has been reopened. The docstring of the package argues that fault by fault.
2. ``volume``, ``index``: a volume is one such database, with a summary of its rows in memory. The index file next to it
   is a shortcut: without it, the volume is read through. It also has checksums of the volume's logs: everything in a
   closed log was acknowledged, so a change at its end is damage, although it may look like a torn commit.
3. ``metadata``: a commit's metadata changes are part of its batch, as a journal entry. The metadata database may lag
   behind; opening applies the rest of the journal. Entries are numbered without gaps across all volumes.
4. ``volume_list``: the list names the volumes. It is replaced as a whole. A volume is listed, durably, before its first
   row is written, and its files are removed only after it has been removed from the list, durably.
5. ``volume_set``, ``open_databases``, ``reads``, ``view``: the volumes as an immutable value. Readers pin the set that
   they start with; files stay while a pinned set names them, databases stay open while they are leased.
6. ``operations``, ``row_writes``, ``next_volume``, ``commit``: the one writer of the newest volume and of the set. Order:
   batch, sync, memory, callbacks.
7. ``keeper_thread``, ``keeper``, ``tidying``: one thread that changes sealed volumes, each time with one synced batch,
   and copies live rows before it removes volumes from the list. Before a volume is removed, the metadata database is
   durable up to the volume's last journal entry.
8. ``opening``: the checks when a store is opened; ``upgrade``: directories of earlier formats; ``former``: what those
   need afterwards.
9. ``group_commit``, ``inline_policy``, ``tables``, ``store``: which thread calls what; ``open_tables``: when everything
   is reopened after a failure.

A commit is acknowledged when ``commit.Committer.write`` has returned, after the sync of its batch. If it changes rows
of sealed volumes, the keeper has synced each of these changes as well.

What a kill or a power cut may leave unfinished, and why nothing acknowledged is missing then:

    a batch before its sync       its commit was not acknowledged; it is there whole, or not at all
    a rollback between volumes    it was not acknowledged, and the rest of its commit is not written; its caller
                                  repeats it. No reader of committed messages is shown rows of its transaction
    a removal between volumes     only rows that no reader may see are removed; cleaning repeats it
    the next volume               unlisted, so opening removes it; or listed and empty
    a sealed volume's flush       its log has every batch, each of them synced
    a checkpoint                  the journal has its entries; opening applies them again
    a rewrite, before its list    the copy is not listed, so opening removes it; the sources have not lost a row
    a rewrite or drop, after it   the sources are not listed, so opening removes them
"""

from __future__ import annotations

from storage.leveldb.options import LevelDBOptions
from storage.leveldb.store import LevelDBStore

__all__ = ["LevelDBOptions", "LevelDBStore"]
