"""The engine: one LevelDB, and everything that is done to it from outside.

The rest of ``storage.leveldb`` makes a store of several databases, and sees of each what ``database.Database`` offers: a
batch, a row, a range, a snapshot, a flush. This room alone imports plyvel, and knows LevelDB's files.

**What LevelDB guarantees** (its documents ``impl.md`` and ``log_format.md``), used as we use it: one handle, one writing
thread, ``paranoid_checks`` on.

    batch      one record of the log with a checksum; after ``sync`` it survives a power cut; replayed whole or not at all
    table      immutable; synced before the manifest names it; a log is removed only once its rows are in a synced table
    manifest   synced before any file that it makes obsolete is removed
    opening    replays the logs into tables, which it syncs, and begins another log: a log that was read is never appended
               to again; a damaged record, or a part of one with anything after it, is an error instead of a silent loss
    reading    each block has a checksum, which we ask LevelDB to verify at every read (``verify_checksums``)

**What we add**

    newest_log    the log is made longer ahead of writes, with zeros ahead of small ones, and synced by a descriptor of
                  our own while the event loop works: a sync costs the file system no journal write. Without it a small
                  commit takes a fifth to a half longer
    torn_end      a last record that is torn is recognised also where zeros follow it, and left out
    manifest      files that LevelDB takes for granted are looked for before opening
    ranges        damage at the ends of a range, which plyvel's iterators pass over, is an error
    database      after a failed write nothing is written before the database has been opened again
    packs         many small messages are one row
    compression   tables are compressed if a sample says that it pays
    old_logs      the space of removed logs is freed in steps
    background    LevelDB's thread has a lower priority

The last four never decide what is durable. The rest does, so here is why it is safe against each fault:

**Kill.** What LevelDB wrote is in the page cache, which outlives the process. A record that was being written has a
beginning and zeros after it: ``torn_end`` leaves it out. Its commit was not acknowledged, because that happens after the
sync.

**Power cut.** Of the bytes since the last completed sync any sectors may be stored. Every batch is synced before the next
is written, so these bytes belong to one record, the last one: it is whole, or torn and left out. The length of a log says
nothing, since it is longer than its records: zeros end it. An early sync is a sync: ``begin_sync`` reads the record's
header back from the log that it syncs, and if it is not there it syncs every log of the database. Logs that LevelDB has
removed by then are in synced tables. Zeros are written only after the last record, where nothing but zeros was read
before, by the thread that writes: the file reads the same with them.

A database that is no part of the store yet (the copy of a rewrite, of a takeover) is the exception: its batches are not
synced one by one. ``flush_memory`` puts them into synced tables before anything names it, and until then its files are
removed when the store is opened.

**Torn write.** The same as a power cut, for one record: it is left out only if it is the last one, if a sector or its end
reads as zeros, and if a copy of the database opens without it. Only then the file itself is cut, and the cut is synced. A
record that is damaged in another way, or has others after it, was acknowledged: the database is not opened.

**Full disk.** Making a log longer takes no blocks, and a failure to write zeros is ignored: LevelDB then appends as it would
have. If LevelDB's own write fails, its record may be torn and the handle is still open: ``Database.batch`` refuses
everything from then on, and opening again leaves the record out or replays it whole. The outcome is reported as unknown.

**Failed sync.** The kernel reports it once and may drop the data. It is never repeated. No further batch is written, and
the store shows nothing until the database has been opened again. Opening reads what the disk or the page cache still has
of the log and writes it to a new table, which it syncs: from then on the commit is durable, or it was never there.

**Unreadable block.** Reading one raises ``Unreadable``; rows in other blocks are read. No row is ever taken for absent
because its block cannot be verified: that is what ``ranges`` looks for at the ends of what it found.
"""
