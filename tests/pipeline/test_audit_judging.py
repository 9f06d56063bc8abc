"""Good messages and dead letters, with their reasons, are those of the reference, for every kind of payload."""

from __future__ import annotations

import json
import random

import pytest

from pyspark_plainsong.pipeline.audit.generator import SPOILING
from pyspark_plainsong.pipeline.audit.keeping import TABLES, absorb, keep
from tests.pipeline.audit_messages import PUBLISHED_MS, check_equal, frame_of, messages_of, tables_in
from tests.pipeline.audit_reference import Bad, Tables, judge

ACCESS = {
    "version": 1, "type": "access", "time": 1_739_000_000_000, "namespace": "default", "user": "ada",
    "program": "load", "run": "r1", "dataset": "raw", "access": "read",
}  # fmt: skip
EDIT = {
    "version": 1, "type": "metadata", "time": 1_739_000_000_000, "namespace": "default", "user": "ada",
    "entity": "dataset:raw", "previous": {"properties": {"a": "1"}, "tags": ["x"]},
    "added": {"properties": {"b": "ü"}, "tags": []}, "removed": {"tags": ["x"]},
}  # fmt: skip

GOOD = [
    *[ACCESS, EDIT, {**ACCESS, "later": [1]}, {**ACCESS, "access": "unknown"}, {**ACCESS, "user": "x" * 1024}],
    *[{**ACCESS, "dataset": "a:b c/ü\U0001f600"}, {**EDIT, "entity": "program:x:y"}, {**EDIT, "previous": None}],
    *[{key: value for key, value in EDIT.items() if key not in ("previous", "added")}],
    *[{**EDIT, "added": {}}, {**EDIT, "added": {"properties": None, "tags": None, "more": 1}}],
    *[{**ACCESS, "time": PUBLISHED_MS + 86_000_000}, {**ACCESS, "time": 946_684_800_000}],
]
ODD = [
    *[b"", b"  ", b"\x00", b"5", b'"x"', b"null", b"true", b"[]", b"{}", b"{} {}", b"{},{}", b"{}]", b"{}}", b"NaN"],
    *[b"{}] [{}", b'{}} {"a":{}', b"// x\n{}", b"{'a':1}", b'{"version":01}', b'{"version":+1}', b'{"version":1,}'],
    *[b'\xef\xbb\xbf{"version":1}', b'{"version":1,"version":1}', b'{"user":"\\ud800"}', b'{"user":"a\tb"}'],
    *[b"[" * 100_000, b'{"version":' + b"[" * 2000 + b"]" * 2000 + b"}", b'{"version":1' + b"0" * 100 + b"}"],
]
CHANGED = [
    *[{**ACCESS, "version": each} for each in (2, -1, 1.0, 1.5, True, "1", None, [], 2**63, 2**70, 1e300)],
    *[{**ACCESS, "type": each} for each in ("", "Access", 1, None, "x" * 5000)],
    *[{**ACCESS, "time": each} for each in (0, -1, 2**63 - 1, -(2**63), 2**63, 946_684_799_999, "0", 1.5, None, {})],
    *[{**ACCESS, "time": PUBLISHED_MS + 90_000_000}],
    *[{**ACCESS, name: each} for name in ("user", "namespace", "program", "run", "dataset")
      for each in ("", "a\nb", "a\n", "a\x7f", "x" * 1025, 5, None, ["a"], {"a": "b"}, False)],
    *[{**ACCESS, "access": each} for each in ("", "READ", "reads", "read\n", 1, None)],
    *[{**EDIT, "entity": each} for each in ("", "raw", ":raw", "dataset:", "Data:x", "d-s:x", "dataset:a\n", 7, None)],
    *[{**EDIT, "entity": "k" * 33 + ":x"}],
    *[{**EDIT, part: each} for part in ("previous", "added", "removed")
      for each in (1, "x", [], {"tags": "x"}, {"tags": [1]}, {"tags": ["a", None]}, {"tags": {"a": "b"}},
                   {"properties": []}, {"properties": {"a": 1}}, {"properties": {"a": None}}, {"properties": "x"})],
    *[{**EDIT, "added": None, "removed": None}],
    *[{key: value for key, value in whole.items() if key != left} for whole in (ACCESS, EDIT) for left in whole],
]  # fmt: skip


def as_payload(fields: dict) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def test_each_payload_is_judged_as_the_reference_judges_it_and_none_is_lost(spark, tmp_path):
    rng = random.Random(5)
    payloads = [as_payload(each) for each in (*GOOD, *CHANGED)] + ODD
    payloads += [spoil(dict(rng.choice((ACCESS, EDIT)))) for ways in SPOILING.values() for spoil in ways]
    messages = messages_of(payloads)
    expected = Tables(messages)
    with keep(tmp_path, TABLES) as keeping:
        absorbed = absorb(keeping, frame_of(spark, messages))
    assert (absorbed.messages, absorbed.bad) == (len(messages), len(expected.dead))
    check_equal(tables_in(tmp_path), expected)
    assert {row[0] for row in expected.dead.values()} == set(SPOILING)


@pytest.mark.parametrize("fields", GOOD)
def test_payloads_of_the_right_shape_are_good(fields):
    assert judge(as_payload(fields), PUBLISHED_MS)["user"]


@pytest.mark.parametrize(("reason", "spoil"), [(reason, each) for reason, ways in SPOILING.items() for each in ways])
@pytest.mark.parametrize("fields", [ACCESS, EDIT])
def test_each_way_to_spoil_a_message_gives_the_reason_it_is_listed_under(reason, spoil, fields):
    with pytest.raises(Bad) as bad:
        judge(spoil(dict(fields)), PUBLISHED_MS)
    assert bad.value.args[0] == reason
