"""Lineage: the sources and targets of a dataset, at any depth, around cycles; compared with a search of all paths."""

from __future__ import annotations

from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from pyspark_plainsong.pipeline.audit.lineage import EDGES, Flow, FlowsAt, closure, flows, walk
from pyspark_plainsong.pipeline.audit.manifest import Part, TablesManifest, store_manifest
from pyspark_plainsong.pipeline.audit.reading import frame
from tests.pipeline.audit_reference import distances, flows_of

NOW = datetime(2025, 1, 1, tzinfo=UTC)
datasets = st.sampled_from("abcdefg")
steps = st.sets(st.tuples(datasets, datasets), max_size=14)
edges = st.lists(
    st.tuples(
        st.just("default"),
        st.sampled_from(["p", "q"]),
        st.sampled_from(["1", "2", "3"]),
        datasets,
        st.sampled_from(["read", "write", "read", "write", "unknown"]),
    ),
    max_size=20,
)


def flows_at(every, direction):
    made = [Flow(source, "p", target, 1, NOW, NOW) for source, target in every]
    near = attrgetter("target" if direction == "up" else "source")
    return lambda frontier: [flow for flow in made if near(flow) in frontier]


@given(steps, datasets, st.sampled_from(["up", "down"]), st.none() | st.integers(1, 5))
def test_a_walk_visits_all_sources_or_targets_of_a_dataset_by_the_shortest_way_and_ends(every, start, direction, depth):
    found = list(walk(start, flows_at(every, direction), direction, depth))
    turned = every if direction == "down" else {(target, source) for source, target in every}
    expected = {name: far for name, far in distances(turned, start).items() if depth is None or far <= depth}
    shortest: dict[str, int] = {}
    for distance, flow in found:
        shortest.setdefault(flow.far(direction), distance)
    assert shortest == expected
    assert len(found) == len({flow for _, flow in found}), "each flow occurs once"
    assert [distance for distance, _ in found] == sorted(distance for distance, _ in found)


@given(edges, st.integers(1, 3), datasets, st.sampled_from(["up", "down"]), st.booleans())
@settings(max_examples=60)
def test_a_walk_through_files_finds_the_flows_of_runs_however_edges_are_spread_over_parts(
    every, parts, start, direction, unknown
):
    with TemporaryDirectory() as folder:
        write_edges(Path(folder), every, parts)
        at = FlowsAt(Path(folder), "default", direction, unknown=unknown, by_run=True)
        found = {(f.source, f.program, f.run, f.target) for _, f in walk(start, at, direction)}
        by_program = FlowsAt(Path(folder), "default", direction, unknown=unknown)
        runs = {(f.source, f.program, f.target): f.runs for _, f in walk(start, by_program, direction)}
    all_flows = flows_of(every, unknown=unknown)
    reached = {start} | set(distances({step(each, direction) for each in all_flows}, start))
    expected = {each for each in all_flows if step(each, direction)[0] in reached}
    assert found == expected
    counted: dict[tuple[str, str, str], int] = {}
    for source, program, _run, target in expected:
        counted[source, program, target] = counted.get((source, program, target), 0) + 1
    assert runs == counted


def step(flow, direction):
    source, _program, _run, target = flow
    return (source, target) if direction == "down" else (target, source)


def write_edges(root: Path, every, parts: int = 1, times=None) -> None:
    """Write a table of edges in the job's form, without Spark."""
    made = []
    for number in range(parts):
        mine = every[number::parts]
        rows = [(*each, *(times[each] if times else (NOW, NOW)), 1) for each in mine]
        if not rows:
            continue
        folder = root / f"data/{number}/edges"
        folder.mkdir(parents=True)
        columns = dict(zip(EDGES.columns.names, zip(*rows, strict=True), strict=True))
        table = pa.table(
            {name: list(values) for name, values in columns.items()},
            schema=to_arrow_schema(EDGES.columns, timezone="UTC"),
        )
        pq.write_table(table, folder / "part-0.parquet")
        made.append(Part("edges", f"data/{number}/edges", ("part-0.parquet",), len(rows), 1))
    store_manifest(root, TablesManifest(1, {}, tuple(made)))


def test_a_time_range_leaves_out_accesses_outside_it(tmp_path):
    def at(day):
        return datetime(2025, 1, day, tzinfo=UTC)

    old = [("default", "p", "1", "a", "read"), ("default", "p", "1", "b", "write")]
    new = [("default", "p", "2", "c", "read"), ("default", "p", "2", "b", "write")]
    times = {**dict.fromkeys(old, (at(1), at(2))), **dict.fromkeys(new, (at(3), at(4)))}
    write_edges(tmp_path, [*old, *new], 2, times)

    def sources(**bounds):
        return {flow.source for _, flow in walk("b", FlowsAt(tmp_path, "default", "up", **bounds), "up")}

    assert sources() == {"a", "c"}
    assert sources(start=at(3)) == {"c"}
    assert sources(end=at(3)) == {"a"}
    assert sources(start=at(2), end=at(4)) == {"a", "c"}
    assert sources(start=at(5)) == set()


def test_other_namespaces_and_runs_of_the_same_name_in_other_programs_cause_no_flow(tmp_path):
    every = [
        ("default", "p", "1", "a", "read"),
        ("default", "q", "1", "b", "write"),
        ("other", "p", "1", "b", "write"),
        ("other", "p", "1", "x", "read"),
    ]
    write_edges(tmp_path, every)
    assert list(walk("b", FlowsAt(tmp_path, "default", "up"), "up")) == []
    assert [flow.source for _, flow in walk("b", FlowsAt(tmp_path, "other", "up"), "up")] == ["x"]


@pytest.mark.usefixtures("adaptive")
@pytest.mark.parametrize(("unknown", "depth"), [(False, None), (True, 2)])
def test_flows_and_their_closure_as_tables_equal_those_of_the_reference(spark, tmp_path, unknown, depth):
    every = [
        *((("default", f"p{n}", "1", chr(97 + n), "read"), ("default", f"p{n}", "1", chr(98 + n), "write")) for n in range(5)),
        (("default", "back", "1", "d", "read"), ("default", "back", "1", "b", "write")),
        (("default", "self", "1", "f", "read"), ("default", "self", "1", "f", "write")),
        (("default", "odd", "1", "z", "unknown"), ("default", "odd", "1", "a", "write")),
    ]  # fmt: skip
    flat = [each for pair in every for each in pair]
    write_edges(tmp_path, flat, 2)
    flow = flows(frame(spark, tmp_path, EDGES), unknown=unknown)
    expected = flows_of(flat, unknown=unknown)
    assert {(r.source, r.program, r.target) for r in flow.collect()} == {(s, p, t) for s, p, _, t in expected}
    pairs = {(s, t) for s, _, _, t in expected}
    found = {(r.source, r.target): r.distance for r in closure(flow, depth=depth).collect()}
    assert found == {
        (start, end): distance
        for start in {s for s, _ in pairs}
        for end, distance in distances(pairs, start).items()
        if depth is None or distance <= depth
    }
