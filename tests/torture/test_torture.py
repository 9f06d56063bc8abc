"""A real daemon on a failing disk, and on possible states of its directory after a power cut.

These tests make a few attacks of each kind; ``python -m tests.torture`` makes as many as time permits.
"""

from __future__ import annotations

import errno
from random import Random

import pytest

from tests.torture.course import SIZES, with_failing_calls
from tests.torture.cuts import judge, record
from tests.torture.disk import Plan, why_not
from tests.torture.faults import storm
from tests.torture.power import STYLES

SEED = 190
pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (Plan(47, error=errno.ENOSPC), "default sizes"),
        (Plan(47, error=errno.ENOSPC), "smallest sizes"),
        (Plan(130, error=errno.EIO, torn=True), "smallest sizes"),
        (Plan(60, 1 << 32, every=149, error=errno.ENOSPC), "smallest sizes"),
    ],
    ids=str,
)
async def test_a_daemon_keeps_its_promises_whichever_call_to_its_disk_fails(tmp_path, made, plan, sizes):
    verdict = await with_failing_calls(tmp_path, made, plan, SEED, sizes=sizes)
    assert verdict.is_good, str(verdict)
    assert verdict.done >= 1, str(verdict)


@pytest.mark.parametrize("sizes", SIZES)
async def test_every_fault_in_turn_loses_nothing_and_shows_no_anomaly(tmp_path, made, sizes):
    verdict = await storm(tmp_path, made, SEED, sizes=sizes)
    assert verdict.is_good, str(verdict)


@pytest.mark.parametrize("sizes", SIZES)
async def test_after_a_power_cut_everything_acknowledged_is_present_and_nothing_that_was_not_sent(
    tmp_path, made, sizes
):
    rng, recording = Random(SEED), await record(tmp_path, made, SEED, sizes=sizes)
    moments = recording.moments()
    for number, style in enumerate(STYLES):
        # Make one cut during the first opening, before there is anything to lose.
        moment = rng.choice(moments[: recording.ready] if number == 3 else moments[recording.ready :])
        verdict = await judge(recording, moment, style, tmp_path / str(number), SEED)
        assert verdict.is_good, str(verdict)


async def test_a_disk_that_reports_syncs_it_did_not_make_is_detected(tmp_path, made):
    """This shows that images do lose data, and that the checker detects it."""
    recording = await record(tmp_path, made, SEED, acknowledged=20)
    verdict = await judge(recording, len(recording.records), "lost", tmp_path / "image", SEED, lies=".log")
    assert {kind for kind, _ in verdict.anomalies} >= {"lost"}, str(verdict)


@pytest.mark.torture
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(SEED + 1, SEED + 6))
async def test_every_fault_in_turn_many_times_loses_nothing(tmp_path, made, seed, sizes):
    verdict = await storm(tmp_path, made, seed, rounds=4, clocks=seed % 2 == 0, sizes=sizes)
    assert verdict.is_good, str(verdict)
