"""The failure matrix of a topic's producers on HBase: whatever call fails, each message is stored once."""

from __future__ import annotations

import pytest
import trio

from tests.cluster.cases import MAX_CELL_BYTES, ByTopic, Case, Client, course
from tests.cluster.harness import Instance, open_cluster
from tests.cluster.proxy import FAULTS, Fate, calm
from tests.patience import PATIENCE_S

#: A run makes 16 to 19 calls, so higher numbers are never reached.
CALLS = range(1, 21)
SETTINGS = (
    f"storage.hbase.max_cell_bytes={MAX_CELL_BYTES}",
    "deduplication.snapshot_entries=2",
    # All calls may stall at the same time, and none of the counted calls may be the janitor's.
    "storage.hbase.max_connections=100",
    "retention.interval_s=3600",
)


async def run_all(instance: Instance, cases: list[Case], choice: ByTopic) -> None:
    instance.thrift.choose = choice
    async with trio.open_nursery() as nursery:
        for case in cases:
            nursery.start_soon(course, instance, case, choice)


@pytest.mark.parametrize("one_of", [3, pytest.param(1, marks=pytest.mark.torture)])
async def test_each_message_is_stored_once_whichever_call_to_hbase_is_lost_late_or_cut(hbase, tmp_path, one_of):
    """Rows 2, 8, 10 and 23 of the matrix: the call is repeated, or the topic fails and is loaded again.

    Each call gets two of the faults, and each fault hits every third call; in torture, all combinations.
    """
    async with open_cluster(hbase, tmp_path, 1, *SETTINGS, "storage.hbase.timeout_s=1", alone=True) as cluster:
        chosen = [(fault, n) for n in CALLS for at, fault in enumerate(FAULTS) if (n + at) % one_of == 0]
        cases = [Case(f"case-{fault.replace(' ', '-')}-{n}", n, Fate(fault, 1.5)) for fault, n in chosen]
        for case in cases:
            await Client(cluster[0], case.topic).create()
        await run_all(cluster[0], cases, ByTopic(cases))
        made = cluster[0].thrift.faults
        assert made.keys() == {*FAULTS}, made
        assert sum(made.values()) >= len(FAULTS) * 15 // one_of, made


@pytest.mark.parametrize("fault", ["lost request", "lost answer"])
async def test_each_message_is_stored_once_whichever_call_to_hbase_the_daemon_dies_in(hbase, tmp_path, fault):
    """Rows 3 to 7 of the matrix, before and after each call: the kill hits each topic in one of its calls."""
    async with open_cluster(hbase, tmp_path, 1, *SETTINGS, "storage.hbase.timeout_s=60", alone=True) as cluster:
        cases = [Case(f"case-{number}", number, Fate(fault)) for number in CALLS]
        for case in cases:
            await Client(cluster[0], case.topic).create()
        dying = ByTopic(cases, ends=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_all, cluster[0], cases, dying)
            with trio.fail_after(PATIENCE_S):
                await dying.all_hit.wait()
            await cluster[0].kill()
            cluster[0].thrift.choose = calm
            await cluster[0].start()
        assert [case.hit.is_set() for case in cases[:16]] == [True] * 16
