"""Archives lost messages again, while the topic still has them: messages that the table recorded and no longer has.

The jobs remove rows only in `prune`, which records it. Another program may remove them, too: a delete, a restore of an
older version, a repair after files were lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.output import show_messages
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.appending import starting_offsets
from pyspark_plainsong.pipeline.archive.reading import CHECKSUM, rows_in, rows_of
from pyspark_plainsong.pipeline.archive.table import Conflict, Tally, TopicTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pyspark_plainsong.pipeline.archive.appending import Subject


def lost_days(table: TopicTable) -> list[str]:
    """Return the days with fewer rows in the table's files than it recorded; opens no file."""
    rows: dict[str, int | None] = {}
    for file in table.all_files():
        before = rows.get(file.day, 0)
        rows[file.day] = None if before is None or file.rows is None else before + file.rows
    recorded: dict[str, int] = {}
    for generation in table.generations():
        for day in table.days(generation):
            recorded[day] = recorded.get(day, 0) + table.tally(generation, day).rows
    there = {day: rows.get(day, 0) for day in recorded}
    return sorted(day for day, count in there.items() if count is not None and count < recorded[day])


def refill(subject: Subject) -> int:
    """Archive the lost messages of the topic's generation again; return their number.

    Raises:
      CommandFailed: the topic no longer has all of them; nothing was done.
    """
    table = TopicTable.open(subject.files, subject.log.namespace, subject.topic)
    return 0 if table is None else sum(_refill_day(subject, table, day) for day in lost_days(table))


def _refill_day(subject: Subject, table: TopicTable, day: str) -> int:
    log = subject.log
    bounds = layout.Range(
        layout.time_bound(layout.day_start_ms(day)),
        min(layout.time_bound(layout.day_start_ms(day) + layout.DAY_MS), table.end(log.generation)),
    )
    recorded, present = table.tally(log.generation, day), _present(subject, table, day)
    if present.rows >= recorded.rows or bounds.start >= bounds.end:
        return 0  # the missing rows are of another generation, which the topic no longer has
    there = rows_of(subject.run.session(), table, bounds, log.generation).select("message_id")
    lacking = _in_topic(subject, bounds).join(there, "message_id", "left_anti").sortWithinPartitions("message_id")
    written = subject.writer().write(lacking, bounds)
    found = sum((each.tally for each in written), Tally())
    missing = recorded.rows - present.rows - found.rows
    if missing > 0 and not subject.choices.may_lose:
        raise CommandFailed(
            f"{log.name}: the archive lacks {show_messages(missing)} of {day} that it had, and the topic no "
            "longer has them",
            hint="restore the table's files, or continue with the remaining messages: --may-lose",
            code=Exit.STORE,
        )
    try:
        table.refill(log.generation, day, written, present + found)
    except Conflict as error:
        says = f"{log.name}: another process changed {day} while it was archived again"
        raise CommandFailed(says, hint="run it again", code=Exit.STORE) from error
    says = f"{log.name}: the archive had lost messages of {day}; {show_messages(found.rows)} archived again"
    subject.run.warn(says, "hole", topic=subject.topic, rows=found.rows, day=day, lost=max(0, missing))
    return found.rows


def _present(subject: Subject, table: TopicTable, day: str) -> Tally:
    found = [each for each in table.all_files() if each.day == day]
    rows = rows_in(subject.run.session(), table, found).where(sf.col("generation") == subject.log.generation)
    row = rows.agg(sf.count(sf.lit(1)).alias("rows"), sf.coalesce(sf.bit_xor(CHECKSUM), sf.lit(0)).alias("xor")).first()
    return Tally() if row is None else Tally(int(row["rows"]), int(row["xor"]))


def _in_topic(subject: Subject, bounds: layout.Range) -> DataFrame:
    options = subject.source(bounds.start) | {"endingOffsets": starting_offsets(subject.log, bounds.end)}
    for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger"):
        del options[name]
    options["failOnDataLoss"] = "false"
    return subject.run.session().read.format("plainsong").options(**options).load()
