"""The generator: the same messages for the same seed, with skew, delays and bad messages as configured."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise

from click.testing import CliRunner

from pyspark_plainsong.pipeline.audit.command import audit
from pyspark_plainsong.pipeline.audit.generator import SPAN_MS, START_MS, payloads
from tests.pipeline.audit_reference import Bad, Tables, flows_of, judge

PUBLISHED_MS = START_MS + SPAN_MS


def test_equal_seeds_make_equal_messages_and_other_seeds_others():
    assert list(payloads(500, 7, bad=0.1)) == list(payloads(500, 7, bad=0.1))
    assert list(payloads(500, 7)) != list(payloads(500, 8))


def test_messages_are_generated_one_by_one():
    assert len(list(islice(payloads(10**12, 1), 100))) == 100


def test_a_part_is_bad_for_every_reason_and_the_rest_is_good():
    reasons: Counter[str] = Counter()
    for each in payloads(5000, 1, bad=0.2):
        assert b"\n" not in each
        try:
            judge(each, PUBLISHED_MS)
        except Bad as bad:
            reasons[bad.args[0]] += 1
    assert 900 < reasons.total() < 1100
    assert len(reasons) == 9
    for each in payloads(5000, 1):
        judge(each, PUBLISHED_MS)


def test_generated_messages_resemble_a_real_platform():
    made = list(payloads(20_000, 2))
    told = [json.loads(each) for each in made]
    kinds = Counter(each["type"] for each in told)
    assert 0.02 < kinds["metadata"] / len(told) < 0.06
    datasets = Counter(each["dataset"] for each in told if each["type"] == "access")
    assert datasets.most_common(1)[0][1] > 20 * sorted(datasets.values())[len(datasets) // 10]
    assert len({each["user"] for each in told}) > 15
    times = [each["time"] for each in told]
    assert START_MS <= min(times) <= max(times) < START_MS + SPAN_MS
    assert sum(a > b for a, b in pairwise(times)) > 100, "some come late"
    assert len(made) - len(set(made)) > 10, "some come twice"
    edges = Tables(("t", number.to_bytes(20, "big"), PUBLISHED_MS, each) for number, each in enumerate(made)).edges
    steps = {(source, target) for source, _, _, target in flows_of(islice(edges, 2000))}
    assert any((target, source) in steps for source, target in steps), "there are cycles"


def test_the_value_before_a_change_is_that_of_the_changes_before_it():
    has: dict[str, dict] = {}
    for each in map(json.loads, payloads(20_000, 3)):
        if each["type"] != "metadata":
            continue
        before = has.get(each["entity"], {"properties": {}, "tags": []})
        if each["previous"] != before:
            assert each["time"]
            continue  # published twice
        properties = {k: v for k, v in before["properties"].items() if k not in each["removed"]["properties"]}
        tags = [tag for tag in before["tags"] if tag not in each["removed"]["tags"]]
        has[each["entity"]] = {
            "properties": {**properties, **each["added"]["properties"]},
            "tags": tags + each["added"]["tags"],
        }
    assert len(has) > 50


def test_lines_are_written_and_a_dry_run_writes_none(tmp_path):
    out = tmp_path / "audit.jsonl"
    words = ["generate", "--messages", "1e3", "--seed", "7", "--bad", "0.1", "--out", str(out)]
    dry = CliRunner().invoke(audit, [*words, "--dry-run", "--json"])
    assert dry.exit_code == 0
    assert json.loads(dry.stdout.splitlines()[0])["messages"] == 1000
    assert not out.exists()
    assert CliRunner().invoke(audit, words).exit_code == 0
    assert out.read_bytes().split(b"\n") == [*payloads(1000, 7, bad=0.1), b""]
