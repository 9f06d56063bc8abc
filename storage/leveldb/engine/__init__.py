"""The engine: one LevelDB, and all access to it.

The rest of ``storage.leveldb`` builds a store from several databases. It sees what ``database.Database`` offers:
batches, rows, ranges, snapshots, flushes. Only this package imports plyvel and handles LevelDB's files.

**What LevelDB guarantees** (its documents ``impl.md`` and ``log_format.md``), as we use it: one handle, one
writing thread, ``paranoid_checks`` on.

    batch      one log record with a checksum; after ``sync`` it survives a power cut; replayed whole or not at all
    table      immutable; synced before the manifest names it; a log is removed only once its rows are in a synced table
    manifest   synced before any file that it makes obsolete is removed
    opening    replays the logs into tables, which it syncs, and begins another log: nothing is appended to a log that
               was read; a damaged record, or a part of one with anything after it, is an error instead of a silent loss
    reading    each block has a checksum, which we ask LevelDB to verify at every read (``verify_checksums``)

It relies on the file system for two things that POSIX does not promise and ext4, XFS and btrfs keep: a sync of a new
file makes its name durable, and renames and removals become durable in order. Where a name is ours (a volume's
folder, the list, an index that is removed), we sync the directory.

**What we add**

    newest_log    the log is extended ahead of writes, with zeros ahead of small ones, and synced through our own
                  descriptor while the event loop works, so that a sync costs the file system no journal write; without
                  it a small commit takes a fifth to a half longer
    torn_end      a torn last record is also recognised if zeros follow it, and left out
    manifest      files whose existence LevelDB assumes are checked before opening
    ranges        damage at the ends of a range, which plyvel's iterators ignore, is an error
    database      after a failed write nothing is written before the database has been reopened
    packs         many small messages are stored as one row; plain_parts reads them, row_edits changes single rows
    background    LevelDB's thread is started at opening, where a refusal can be reported, and gets a lower priority

The last two never decide what is durable. The others do, so here is why each fault is safe:

**Kill.** Data that LevelDB wrote is in the page cache, which outlives the process. A record that was being written has
a beginning followed by zeros: ``torn_end`` leaves it out. Its commit was not acknowledged, because that happens after
the sync.

**Power cut.** Of the bytes written since the last completed sync, any sectors may be stored. Every batch is synced
before the next is written, so these bytes belong to the last record: it is whole, or torn and left out. The length of a
log is no evidence, since a log is longer than its records and ends in zeros. An early sync is a sync too:
``begin_sync`` reads the record's header back from the log that it syncs, and if the header is missing, it syncs every
log of the database. Logs that LevelDB has removed by then are in synced tables. Zeros are written only after the last
record, over a range that was read as zeros, by the thread that writes: the file reads the same with them.

The exception is a database that is not part of the store yet (the copy of a rewrite or upgrade): its batches are not
synced one by one. ``flush_memory`` puts them into synced tables before anything names it; until then, opening the store
removes its files.

**Torn write.** The same as a power cut, for one record: it is left out only if it is the last one, if a sector or its
end reads as zeros, and if a copy of the database opens without it. Only then is the file itself cut, and the cut
synced. A record that is damaged in another way, or followed by others, was acknowledged: the database is not opened.

**Full disk.** Extending a log takes no blocks, and a failure to write zeros is ignored: LevelDB then appends as it
would without them. If LevelDB's own write fails, its record may be torn and the handle is still open:
``Database.batch`` refuses everything from then on, and reopening leaves the record out or replays it whole. The outcome
is reported as unknown.

**Failed sync.** The kernel reports it once and may drop the data. It is never repeated. No further batch is written,
and the store shows nothing until the database has been reopened. Reopening reads what the disk or the page cache still
has of the log and writes it to a new table, which it syncs: from then on the commit is durable, or it never existed.

**Unreadable block.** Reading one raises ``Unreadable``; rows in other blocks can be read. No row is treated as absent
because its block cannot be verified: ``ranges`` checks for that at the ends of each result.
"""
