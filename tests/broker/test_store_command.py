"""``plainsong store dump`` and ``explain``: a stopped store as text, and clear errors for other directories."""

from __future__ import annotations

import base64
import json
import os

import pytest
import trio

from plainsong.cli.command import Exit
from plainsong.cli.main import program, run
from plainsong.protocol.ids import pack_id
from storage.directory import DataDirectory
from storage.leveldb import LevelDBStore
from tests.storage.disks import snapshot
from tests.storage.rows_of_all_kinds import NOW_MS, make_store


@pytest.fixture
def store_command(capsys, monkeypatch):
    for name in ("PORT", *(each for each in os.environ if each.startswith("PLAINSONG_"))):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(program, ("store", *arguments), "plainsong")
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def directory(tmp_path):
    return str(trio.run(make_store, tmp_path / "data"))


@pytest.fixture
def damaged(tmp_path):
    async def make():
        return await make_store(tmp_path / "data", damaged=True)

    return str(trio.run(make))


def test_dump_shows_every_row_as_one_line(store_command, directory):
    code, out, err = store_command("dump", "--data-dir", directory)
    assert (code, err) == (Exit.OK, "")
    assert len(out.splitlines()) == 21
    assert "of a deleted topic" in out


def test_dump_as_json_prints_one_object_per_line_with_payloads_in_base64(store_command, directory):
    code, out, _ = store_command("dump", "--data-dir", directory, "--json", "--table", "message", "--generation", "2")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == Exit.OK
    assert [base64.b64decode(row.get("payload", "")) for row in rows][3] == b"\xff\x00plain"
    assert rows[-2]["write_pointer"] == 77
    assert rows[-2]["rolled_back"] is True
    assert rows[-2]["id"] == pack_id(NOW_MS, 1).hex()


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--limit", "3"], 3),
        (["--table", "payload"], 1),
        (["--table", "payload", "--table", "metadata"], 13),
        (["--topic", "gone"], 2),
        (["--topic", "shop:gone"], 2),
        (["--table", "message", "--from", str(NOW_MS)], 4),
        (["--table", "message", "--from", pack_id(NOW_MS, 1).hex()], 2),
        (["--table", "message", "--to", str(NOW_MS)], 4),
        (["--table", "message", "--topic", "orders", "--generation", "1"], 1),
    ],
)
def test_dump_shows_only_the_chosen_rows(store_command, directory, arguments, count):
    code, out, _ = store_command("dump", "--data-dir", directory, *arguments)
    assert code == Exit.OK
    assert len(out.splitlines()) == count


@pytest.mark.parametrize("arguments", [["--namespace", "nobody"], ["--topic", "no-such"], ["--topic", "nobody:orders"]])
def test_a_topic_without_rows_is_reported_to_have_none(store_command, directory, arguments):
    code, out, err = store_command("dump", "--data-dir", directory, *arguments)
    assert (code, out) == (Exit.NOT_FOUND, "")
    assert err.startswith("error: no rows of ")


@pytest.mark.parametrize("place", ["yesterday", "-1", "0" * 39, str(1 << 63)])
def test_a_position_that_is_neither_id_nor_time_is_refused(store_command, directory, place):
    code, _, err = store_command("dump", "--data-dir", directory, f"--from={place}")
    assert code == Exit.USAGE
    assert "40 hex digits" in err


def test_explain_sums_up_by_topic_and_generation(store_command, directory):
    code, out, _ = store_command("explain", "--data-dir", directory)
    assert code == Exit.OK
    assert "shop:orders  generation 2, ttl 3600 s" in out
    assert "g1: 1 message, " in out
    assert "deleted 2023-11-14 22:13:20.000Z" in out


def test_explain_as_json_says_the_same(store_command, directory):
    code, out, _ = store_command("explain", "--data-dir", directory, "--json")
    said = json.loads(out)
    assert code == Exit.OK
    assert [(topic["topic"], topic["generation"]) for topic in said["topics"]] == [("gone", 1), ("orders", 2)]
    assert said["tables"]["message"]["rows"] == 8
    assert said["transactions"] == {
        "service": "embedded",
        "in_progress": 1,
        "invalid": 2,
        "oldest_invalid": NOW_MS * 1_000_000,
        "safe_bound": NOW_MS * 1_000_000 - 7,
        "last_pass_ms": NOW_MS - 5,
        "oldest_referenced": NOW_MS * 1_000_000,
    }


def test_explain_shows_the_figures_for_pruning_the_invalid_list_of_a_stopped_daemon(store_command, directory):
    _, out, _ = store_command("explain", "--data-dir", directory)
    assert "service embedded, 1 in progress, 2 invalid pointers" in out
    assert f"oldest invalid pointer {NOW_MS * 1_000_000}" in out
    assert f"oldest pointer with rows in a topic {NOW_MS * 1_000_000}" in out
    assert f"safe to prune up to {NOW_MS * 1_000_000 - 7}, by the pass of 2023-11-14 22:13:19.995Z" in out
    assert f"1 undecided write pointer, the oldest {NOW_MS * 1_000_000}" in out
    assert "1 of invalid transactions" in out


def test_without_a_complete_pass_explain_says_that_nothing_is_safe_to_prune(store_command, tmp_path):
    async def make():
        async with await LevelDBStore.open(tmp_path / "data"):
            pass

    trio.run(make)
    _, out, _ = store_command("explain", "--data-dir", str(tmp_path / "data"))
    assert "service not chosen yet, 0 in progress, 0 invalid pointers" in out
    assert "nothing is safe to prune" in out


def test_rows_that_do_not_parse_are_shown_and_counted_and_change_the_exit_code(store_command, damaged):
    code, out, err = store_command("explain", "--data-dir", damaged)
    assert code == Exit.FAILED
    assert out.count("CANNOT BE PARSED") == 11
    assert "12 rows cannot be parsed" in err
    code, out, _ = store_command("dump", "--data-dir", damaged)
    assert code == Exit.OK
    assert out.count("CANNOT BE PARSED") == 12


def test_nothing_in_the_directory_changes(store_command, damaged, tmp_path):
    before = snapshot(tmp_path)
    store_command("dump", "--data-dir", damaged)
    store_command("explain", "--data-dir", damaged)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", ["dump", "explain"])
def test_the_directory_of_a_running_daemon_is_refused_with_its_process(store_command, directory, command, tmp_path):
    held = DataDirectory.open(tmp_path / "data", address="127.0.0.1:7420")
    try:
        code, out, err = store_command(command, "--data-dir", directory)
    finally:
        held.close()
    assert (code, out) == (Exit.STORE, "")
    assert "is in use by process" in err
    assert "127.0.0.1:7420" in err


def test_a_directory_that_is_not_a_store_is_refused(store_command, tmp_path):
    code, out, err = store_command("explain", "--data-dir", str(tmp_path))
    assert (code, out) == (Exit.STORE, "")
    assert "is not a store" in err
    assert "hint: " in err
