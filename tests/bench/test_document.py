"""The documents' tables are generated from the results of runs, each in one place of its document."""

from __future__ import annotations

import json

import pytest

from bench import document
from bench.document import TABLES, Run, written
from bench.rounds import Row, Section, Spread
from tests.documents import DOCUMENTS

FACTS = {"date": "2026-01-31", "cores": "2", "load before": "0.05 0.10 0.20", "a synced append of 200 B": "0.11 ms"}


def run_of(*sections, profile="full"):
    return Run({section.name: section.record() for section in sections}, FACTS, profile)


def section_of(name, *rows):
    return Section(
        name,
        "",
        "",
        [Row(what, {column: Spread.of([value]) for column, value in values.items()}) for what, values in rows],
    )


def rates(*loads, **peers):
    """A section in which each of these loads has the same rates."""
    return section_of("peers-rates", *(({"load": load}, peers) for load in loads))


def waits(load, **peers):
    """A section with the p50 of each peer's waits, and a p99 of twice that."""
    return section_of(
        "peers-waits",
        *(({"load": load, "peer": peer}, {"p50 ms": p50, "p99 ms": 2 * p50}) for peer, p50 in peers.items()),
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.path}-{table.name}")
def test_every_table_has_one_place_in_its_document(table):
    text = written(DOCUMENTS[table.path], table.name, ["| here |"])
    begin, end = document.marks(table.name)
    assert f"{begin}\n\n| here |\n\n{end}" in text


def test_a_table_without_a_place_is_an_error():
    with pytest.raises(LookupError, match="0 places"):
        written("a page", "rates", [])


def test_peers_without_a_load_have_an_empty_cell():
    run = run_of(rates("single, 1 connection", plainsong=5040.0, redis=7100.0))
    assert document.rates(run)[2:] == ["| single, 1 connection | 5.0 k |  |  |  |  | 7.1 k |"]


def test_a_transaction_is_shown_with_how_long_it_takes():
    load = "transaction, 1 topic, 16 connections"
    run = run_of(rates("walk", load, plainsong=1630.0, kafka=40.0), waits(load, plainsong=1.5, kafka=300.0))
    assert document.transactions(run)[2:] == [
        "| 1 topic, 16 connections | 1.6 k (1.50 / 3.00) |  | 40.00 (300 / 600) |  |"
    ]


def test_loads_that_differ_in_connections_alone_are_one_row():
    rates = {"original/s": 2000.0, "plainsong/s": 3000.0, "÷ original": 1.5}
    names = ("store, 1 message, 1 connection", "store, 1 message, 16 connections", "create a topic")
    run = run_of(section_of("peers-both", *(({"load": name}, rates) for name in names)))
    assert document.both(run)[2:] == [
        "| store, 1 message, 1 / 16 | 2.0 k / 2.0 k | 3.0 k / 3.0 k | 1.50 / 1.50 |",
        "| create a topic | 2.0 k | 3.0 k | 1.50 |",
    ]


def test_rows_of_spark_are_shown_by_partitions_and_compared_where_there_is_a_comparison():
    read = {"what": "read", "bytes": 100}
    run = run_of(
        section_of(
            "spark",
            (read | {"partitions": 1}, {"rows/s": 600_000.0, "÷ Kafka": 0.5}),
            (read | {"partitions": 2}, {"rows/s": 450_000.0, "÷ Kafka": 0.4}),
            ({"what": "visible", "bytes": 4, "partitions": 1}, {"ms": 160.0}),
            ({"what": "archive", "bytes": 100, "partitions": 1}, {"rows/s": 200_000.0, "÷ copy": 0.25}),
        )
    )
    assert document.spark(run)[2:] == [
        "| read, 100 B | 600.0 k | 450.0 k | 0.50 |  |",
        "| archive, 100 B | 200.0 k |  |  | 0.25 |",
    ]


def test_growth_is_a_table_for_messages_and_one_for_topics():
    values = dict.fromkeys(
        ("a second", "longest ms since the last size", "anon MB", "anon MB after start", "disk MB"), 12.0
    ) | {"start s": 0.25, "poll p50 ms": 1.0}
    rows = [({"what": what, "stored": stored}, values) for what in ("messages", "topics") for stored in (100, 1000)]
    lines = document.growth(run_of(section_of("growth", *rows)))
    assert [line for line in lines if "100 |" in line] == ["| messages | 100 | 1 000 |", "| topics | 100 | 1 000 |"]
    assert lines.count("| time to start, s | 0.25 | 0.25 |") == 2


def test_a_document_has_the_tables_of_the_measured_sections_and_their_conditions(tmp_path, monkeypatch, capsys):
    for table in TABLES:
        path = tmp_path / table.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(DOCUMENTS[table.path], encoding="utf-8")
    monkeypatch.setattr(document, "ROOT", tmp_path)
    loads = tuple(document.LOADS)
    measured = rates(*loads, **dict.fromkeys(document.PEERS, 1234.0))
    results = {"sections": {measured.name: measured.record()}, "facts": FACTS, "profile": "quick"}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["document", str(file)])
    document.main()
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| one message a request, 1 connection | 1.2 k | 1.2 k | 1.2 k | 1.2 k | 1.2 k |" in readme
    assert "a synced append took 0.11 ms, load before 0.05, **a quick run" in readme
    assert "README.md, rates: from" in capsys.readouterr().out
