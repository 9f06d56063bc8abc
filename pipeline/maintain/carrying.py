"""Plans carried out on Spark: the parts of all topics side by side, each topic asked for once more before its own."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import trio

from pipeline.maintain.asking import check_unchanged
from pipeline.maintain.place import Place, check_same, cut_for, unreachable
from pipeline.maintain.working import Worked, work
from plainsong.cli.verb import CommandFailed
from protocol.errors import GenerationChanged, PlainsongError, TopicNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.job import Run
    from pipeline.maintain.looking import Look
    from pipeline.maintain.ranges import KeyRange
    from plainsong import Client

#: Parts in one job of Spark, between which it is told how far it has come, and topics are asked for again.
AT_ONCE = 64


class Task(NamedTuple):
    """What one task of Spark is given."""

    topic: str
    part: KeyRange


class Total(NamedTuple):
    """What became of a topic, or of all."""

    removed: int = 0
    before: int = 0
    after: int = 0

    def plus(self, worked: Worked | Total) -> Total:
        """With another part."""
        return Total(self.removed + worked.removed, self.before + worked.before, self.after + worked.after)


async def tasks_of(place: Place, looks: Sequence[Look], parts: int) -> list[Task]:
    """The parts of all topics, cut where HBase's rows end.

    Raises:
      CommandFailed: these are not the daemon's tables; nothing was done. Or HBase does not answer.
    """
    try:
        store = await place.store()
        try:
            for look in looks:
                await check_same(store, look)
        finally:
            with trio.CancelScope(shield=True):
                await store.aclose()
        return [
            Task(look.limits.name.topic, part)
            for look in looks
            for whole in look.parts
            for part in await cut_for(place, whole, parts)
        ]
    except PlainsongError as error:
        raise unreachable(error) from error


def carry_out(run: Run, client: Client, place: Place, looks: Sequence[Look], parts: int) -> dict[str, Total]:
    """Do what is planned; what became of each topic. Run again, it goes on.

    Raises:
      CommandFailed: nothing was done, or a part failed: run it again.
    """
    tasks = trio.run(tasks_of, place, looks, parts)
    totals: defaultdict[str, Total] = defaultdict(Total)
    totals.update({look.limits.name.topic: Total() for look in looks})
    if not tasks:
        return totals
    limits = {look.limits.name.topic: look.limits for look in looks}
    spark = run.session().sparkContext
    run.progress.begin()
    for at in range(0, len(tasks), AT_ONCE):
        some = tasks[at : at + AT_ONCE]
        for topic in sorted({task.topic for task in some}):
            try:
                check_unchanged(client, limits[topic])
            except (GenerationChanged, TopicNotFound) as error:
                run.warn(f"{topic} is left out: {error.detail}", "generation_changed", topic=topic)
                some = [task for task in some if task.topic != topic]
        if some:
            done = spark.parallelize(some, len(some)).map(lambda task: work(place, *task)).collect()
            for worked in done:
                totals[worked.topic] = totals[worked.topic].plus(worked)
                run.metrics.add("rows_total", worked.removed, topic=worked.topic)
                run.metrics.add("batches_total", topic=worked.topic)
                run.progress.event("part", **worked._asdict())
        finished = at + len(some)
        run.progress.step(sum(total.removed for total in totals.values()), batch=finished, last=finished == len(tasks))
    return totals


def needed(thrift: str | None, table_prefix: str) -> Place:
    """Where the tables are. Raises CommandFailed: it was not said."""
    if thrift is None:
        raise CommandFailed(
            "the daemons keep their tables in HBase, and --thrift does not say where",
            hint="--thrift HOST:PORT, as the daemons' storage.hbase.thrift; or --dry-run for the plan",
        )
    return Place.parse(thrift, table_prefix)
