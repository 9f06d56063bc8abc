"""What operators see of a second copy: findings, and the duration of writes to the object store."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio

from actors.second_copy import CopyStatus
from actors.settings import ReplicationConfig
from broker.api.operations.replication import Replication
from broker.http.messages import Request
from broker.replication import copy_findings
from plainsong.protocol.errors import ReplicationUnavailable
from storage.replication.measured import MeasuredObjects, PutTimes
from storage.replication.notices import Registration
from storage.replication.protocol import Verdict
from storage.replication.segment import ASYNC
from tests.storage.replication.objects import MemoryObjects

HOUR_MS = 3_600_000
NOW_MS = 1_000 * HOUR_MS
WELL = CopyStatus(
    mode=ASYNC,
    epoch=3,
    last=70,
    counted=70,
    lag_commits=0,
    lag_bytes=0,
    lag_s=0.0,
    uploaded_ms=NOW_MS,
    error="",
    base=50,
    base_ms=NOW_MS - HOUR_MS,
    oldest_ms=NOW_MS - 100 * HOUR_MS,
    given_up=False,
    standbys=(),
    automatic=False,
    alone_s=1e6,
    has_lease=True,
)


def findings(standby="allowed", **changed):
    copy = SimpleNamespace(status=replace(WELL, **changed))
    found = copy_findings(copy, ReplicationConfig(base_every_h=24, standby=standby), lambda: NOW_MS)
    assert {each.kind for each in found} <= {"replication"}
    return [(each.severity, each.text) for each in found]


def test_a_healthy_copy_has_no_findings():
    assert findings() == []
    assert findings(lag_s=59.0, lag_commits=3, base_ms=NOW_MS - 48 * HOUR_MS) == []


@pytest.mark.parametrize(
    ("changed", "severity", "words"),
    [
        ({"counted": None, "base": None}, "warning", "no complete base yet"),
        ({"lag_s": 61.0}, "critical", "61 s behind: away"),
        ({"given_up": True, "counted": None}, "critical", "has a gap"),
        ({"base_ms": NOW_MS - 49 * HOUR_MS}, "warning", "49 h old"),
        ({}, "warning", "cannot write its second copy: away"),
    ],
)
def test_each_problem_for_an_operator_is_one_finding_with_the_reason(changed, severity, words):
    error = "" if "base_ms" in changed else "away"
    ((found, text),) = findings(error=error, **changed)
    assert found == severity
    assert words in text


def test_an_expected_standby_that_is_missing_for_a_minute_is_a_finding():
    ((severity, text),) = findings("expected", alone_s=60.0)
    assert severity == "warning"
    assert text == "No standby has been registered for 60 s although one is expected: no machine would take over"
    assert findings("expected", alone_s=59.0) == []
    assert findings("expected", standbys=(Registration("a", 1),)) == []
    assert findings("allowed") == findings("never") == []


async def switched(*, is_current=True, lease_s=15.0, **changed):
    """Ask for a switch; return its answer, and whether the primary stops."""
    status = replace(WELL, standbys=(Registration("a", 1),), **changed)
    copy, stops = SimpleNamespace(status=status, lease=SimpleNamespace(is_current=is_current)), []
    route = Replication(copy, "s3://b/p", lambda: stops.append(True), lease_s)
    try:
        answer = await route.hand_over(Request({}, "", {}))
    except ReplicationUnavailable as error:
        return error, bool(stops)
    return json.loads(answer.body), bool(stops)


async def test_a_switch_is_refused_while_the_object_store_does_not_respond_or_the_lease_is_over():
    refused, stops = await switched(error="no answer")
    assert (refused.code, stops) == ("replication_unavailable", False)
    assert refused.detail.endswith("so it cannot hand over: no answer")
    assert "plainsong replica switch" in refused.hint
    refused, stops = await switched(is_current=False)
    assert (refused.code, stops) == ("replication_unavailable", False)
    assert refused.detail.endswith("so it cannot hand over")


@pytest.mark.parametrize(
    ("lease_s", "has_lease", "automatic"), [(15.0, True, True), (0.0, True, False), (15.0, False, False)]
)
async def test_the_answer_to_a_switch_says_whether_a_standby_takes_over_by_itself(lease_s, has_lease, automatic):
    answer, stops = await switched(lease_s=lease_s, has_lease=has_lease)
    assert (answer, stops) == ({"epoch": 3, "lastCommit": 70, "automatic": automatic}, True)


async def test_writes_that_took_effect_are_measured_and_no_others(autojump_clock):
    class Slow(MemoryObjects):
        async def create(self, name, data):
            await trio.sleep(len(data))
            return await super().create(name, data)

    objects, times, seen = Slow(), PutTimes(), []
    times.on_put = seen.append
    measured = MeasuredObjects(objects, times)
    assert times.percentile_s(0.5) is None
    for seconds in range(1, 101):
        assert await measured.create(f"{seconds}", b"x" * seconds) is Verdict.DONE
    assert await measured.create("1", b"x" * 500) is Verdict.REFUSED
    objects.away = True
    assert await measured.create("other", b"x" * 500) is Verdict.UNKNOWN
    assert seen == [pytest.approx(seconds) for seconds in range(1, 101)]
    assert (times.count, times.percentile_s(0.5), times.percentile_s(0.99)) == (
        100,
        pytest.approx(51),
        pytest.approx(100),
    )
