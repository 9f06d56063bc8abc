"""Every verb with a real daemon: its effect, its output for people and for programs, and its exit code."""

from __future__ import annotations

import json
import os

import pytest

from plainsong import __version__
from plainsong.cli.command import Exit
from plainsong.cli.ping import ProbeResult
from tests.cli.conftest import url_of
from tests.daemon.harness import Daemon

ID = "0000018bcfe56805000100000000000000000000"


@pytest.fixture
def greetings(cli):
    """A topic with three messages."""
    cli("topic", "create", "greetings")
    cli("publish", "greetings", "one", "two", "three")
    return cli("poll", "greetings", "--json").rows


# --- topics ------------------------------------------------------------------------------------------


def test_a_topic_is_created_shown_changed_deleted_and_undeleted(cli):
    assert "created topic orders" in cli("topic", "create", "orders", "--ttl", "30d", "max_bytes=1GiB").out
    shown = cli("topic", "show", "orders", "--json").json
    assert shown["properties"] == {
        "ttl": "2592000",
        "max_bytes": str(1 << 30),
        "generation": "1",
        "transactional": "optional",
        "deduplication": "inherit",
    }
    cli("topic", "set", "orders", "ttl=90m")
    shown = cli("topic", "show", "orders").out
    assert "ttl            90m" in shown
    assert "max_bytes      1GiB" in shown
    cli("topic", "set", "orders", "max_bytes=default")
    assert "max_bytes" not in cli("topic", "show", "orders").out
    cli("publish", "orders", "kept")
    cli("topic", "delete", "orders", "--yes")
    assert cli("topic", "list").out == ""
    assert "restored topic orders with 1 message" in cli("topic", "undelete", "orders").out
    assert cli("poll", "orders").out == "kept\n"


def test_topics_are_listed_by_pattern_and_in_detail(cli):
    for name in ("orders-eu", "orders-us", "audit"):
        cli("topic", "create", name)
    assert cli("topic", "list").lines == ["audit", "orders-eu", "orders-us"]
    assert cli("topic", "list", "orders-*", "--json").json == ["orders-eu", "orders-us"]
    heading, row = cli("topic", "list", "audit", "--long").lines
    assert heading.split() == ["TOPIC", "TTL", "MESSAGES", "SIZE", "OLDEST"]
    assert row.split() == ["audit", "7d", "0", "0", "B", "-"]
    assert [each["name"] for each in cli("topic", "list", "-l", "--json").json] == ["audit", "orders-eu", "orders-us"]
    assert cli("topic", "list", "x*", code=Exit.NOT_FOUND).err.startswith("error: no topic matches 'x*'")


def test_creating_a_topic_twice_says_how_to_change_it(cli):
    cli("topic", "create", "orders")
    said = cli("topic", "create", "orders", code=Exit.FAILED)
    assert "plainsong topic set orders" in said.err
    cli("topic", "create", "orders", "--if-not-exists")
    cli("topic", "create", "orders", "--if-not-exists", "--ttl", "1h", code=Exit.FAILED)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("topic", "create", "a b"), "topic 'a b' is not allowed"),
        (("topic", "create", "a", "tll=5"), "did you mean 'ttl'"),
        (("topic", "create", "a", "ttl"), "write NAME=VALUE"),
        (("topic", "create", "a", "ttl=soon"), "ttl is 'soon'"),
        (("topic", "create", "a", "--ttl", "soon"), "use for example 30s"),
        (("poll", "a", "-f", "%q"), "unknown field %q"),
        (("poll", "a", "--from", "soon"), "oldest, newest"),
        (("poll", "a", "--from", "oldest", "--last", "3"), "exclude each other"),
        (("publish", "a", "x", "--file", "y"), "not both"),
        (("publish", "a", "--file", "/does/not/exist"), "cannot be read"),
        (("tail", "a", "b", "--last", "3", "--from", "oldest"), "exclude each other"),
        (("poll", "a", "--json", "-f", "%p"), "exclude each other"),
        (("poll", "a", "--url", "nonsense"), "is not the URL of a daemon"),
        (("topic", "delete", "a"), "there is no topic"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_the_correct_form(cli, arguments, says):
    code = Exit.NOT_FOUND if arguments[:2] == ("topic", "delete") else Exit.USAGE
    if code == Exit.NOT_FOUND:
        says = "does not exist"
    said = cli(*arguments, code=code)
    assert says in said.err
    assert said.out == ""


def test_delete_asks_and_requires_yes_without_a_terminal(cli, greetings):
    said = cli("topic", "delete", "greetings", code=Exit.USAGE)
    assert "--yes" in said.err
    assert cli("topic", "list").out == "greetings\n"
    # One of the names is not a topic, so nothing is deleted.
    cli("topic", "delete", "greetings", "other", "--yes", code=Exit.NOT_FOUND)
    assert cli("topic", "list").out == "greetings\n"


# --- definitions -------------------------------------------------------------------------------------


def imported(cli, file, *options, **more):
    return cli("definitions", "import", str(file), *options, **more)


@pytest.fixture
def namespace(cli):
    """Return the namespace of the test."""
    return os.environ["PLAINSONG_NAMESPACE"]


def test_an_import_makes_the_topics_match_the_file(cli, home, namespace):
    file = home / "topics.toml"
    file.write_text(f'[topics.orders]\nttl = "30d"\n[topics.audit]\nttl = "1h"\n[topics."{namespace}_2:till"]\n')
    cli("topic", "create", "audit", "ttl=1h")
    cli("topic", "create", "old")
    dry = imported(cli, file, "--dry-run")
    assert dry.lines == [
        f"+ topics/{namespace}:orders  deduplication inherit  transactional optional  ttl 30d",
        f"+ topics/{namespace}_2:till  deduplication inherit  transactional optional  ttl 7d",
        "2 created, 0 changed, 0 deleted, 1 unchanged",
    ]
    assert cli("topic", "list").lines == ["audit", "old"]
    assert imported(cli, file).lines[-1] == "2 created, 0 changed, 0 deleted, 1 unchanged"
    assert imported(cli, file).lines == ["0 created, 0 changed, 0 deleted, 3 unchanged"]
    assert cli("topic", "list").lines == ["audit", "old", "orders"]
    assert cli("topic", "list", "--namespace", f"{namespace}_2").lines == ["till"]


def test_an_import_resets_properties_of_a_topic_that_the_file_does_not_name(cli, home, namespace):
    cli("topic", "create", "orders", "ttl=1h", "max_bytes=1MiB", "transactional=required")
    file = home / "topics.json"
    file.write_text(json.dumps({"topics": {"orders": {"ttl": 7200, "transactional": "default"}}}))
    assert imported(cli, file).lines == [
        f"~ topics/{namespace}:orders  max_bytes 1MiB -> none  transactional required -> optional  ttl 1h -> 2h",
        "0 created, 1 changed, 0 deleted, 0 unchanged",
    ]
    shown = cli("topic", "show", "orders", "--json").json["properties"]
    assert (shown["ttl"], shown["transactional"], "max_bytes" in shown) == ("7200", "optional", False)


def test_a_file_of_one_namespace_prunes_only_there_and_asks_first(cli, home, namespace):
    for topic in ("orders", "old"):
        cli("topic", "create", topic)
    cli("topic", "create", "kept", "--namespace", f"{namespace}_2")
    file = home / "topics.toml"
    file.write_text("[topics.orders]\n")
    assert "--yes" in imported(cli, file, "--prune", code=Exit.USAGE).err
    assert imported(cli, file, "--prune", "--yes").lines[0] == f"- topics/{namespace}:old"
    assert cli("topic", "list").lines == ["orders"]
    assert cli("topic", "list", "--namespace", f"{namespace}_2").lines == ["kept"]
    file.write_text(f'[topics."{namespace}:orders"]\n')
    assert f"- topics/{namespace}_2:kept" in imported(cli, file, "--prune", "--dry-run").lines


def test_the_former_verb_apply_imports_with_a_warning_and_keeps_what_the_file_does_not_name(cli, home):
    cli("topic", "create", "orders", "ttl=1h", "max_bytes=1MiB")
    file = home / "topics.json"
    file.write_text(json.dumps({"topics": {"orders": {"ttl": 7200}, "new": {}}}))
    said = cli("topic", "apply", "-f", str(file))
    assert said.err == "warning: `topic apply` is `definitions import` now, and the next version removes the old name\n"
    assert said.lines[-1] == "1 created, 1 changed, 0 deleted, 0 unchanged"
    shown = cli("topic", "show", "orders", "--json").json["properties"]
    assert (shown["ttl"], shown["max_bytes"]) == ("7200", str(1 << 20))
    assert "apply" not in cli("topic", "--help").out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no tables of topics"),
        ("[topcis.a]", "did you mean 'topics'"),
        ("topics = 7", "has no tables of topics"),
        ("[topics.a]\ntll = 5", "topic a: unknown property 'tll'"),
        ('[topics.a]\nttl = "soon"', "topic a: ttl is 'soon'"),
        ('[topics."a b"]', "topic 'a b' is not allowed"),
        ("[topics", "Expected ']'"),
        ("[topics.a]\nttl = true", "write for example ttl=7d"),
    ],
)
def test_an_invalid_file_changes_nothing(cli, home, text, says):
    file = home / "topics.toml"
    file.write_text("[topics.good]\n" + text if text.startswith("[topics.") else text)
    assert says in imported(cli, file, code=Exit.USAGE).err
    assert cli("topic", "list").out == ""


# --- publish and poll --------------------------------------------------------------------------------


def test_arguments_are_published_in_their_order(cli, greetings):
    assert [row["payload"] for row in greetings] == ["one", "two", "three"]
    told = cli("publish", "greetings", "four", "--json").json
    assert (told["topic"], told["messages"]) == ("greetings", 1)
    assert told["firstId"] == told["lastId"] > greetings[-1]["id"]
    assert cli("publish", "greetings", "five", "--quiet").out == ""


def test_base64_and_files_carry_any_bytes(cli, home):
    cli("topic", "create", "bytes")
    (home / "picture").write_bytes(b"\x00\n\xff")
    cli("publish", "bytes", "--base64", "AP8=")
    cli("publish", "bytes", "--file", "picture", "--file", "picture")
    payloads = [row["payload"] for row in cli("poll", "bytes", "--json").rows]
    assert payloads == [{"base64": "AP8="}, {"base64": "AAr/"}, {"base64": "AAr/"}]
    said = cli("publish", "bytes", "--base64", "good", "?", code=Exit.USAGE)
    assert "argument 2: invalid base64" in said.err
    assert "nothing published" in said.err


def test_a_ttl_of_their_own_makes_messages_expire_sooner(cli):
    cli("topic", "create", "short")
    cli("publish", "short", "gone", "--ttl", "10m")
    (seen,) = cli("peek", "short", "--json").rows
    assert seen["expiresMs"] - seen["publishTimeMs"] == 600_000
    assert "expires in 9m" in cli("peek", "short").out


def test_poll_starts_and_ends_where_requested(cli, greetings):
    first, second, third = (row["id"] for row in greetings)
    time_ms = greetings[0]["publishTimeMs"]
    assert cli("poll", "greetings").out == "one\ntwo\nthree\n"
    assert cli("poll", "greetings", "--from", second).out == "two\nthree\n"
    assert cli("poll", "greetings", "--after", second).out == "three\n"
    assert cli("poll", "greetings", "--to", third).out == "one\ntwo\n"
    assert cli("poll", "greetings", "--from", str(time_ms)).out == "one\ntwo\nthree\n"
    assert cli("poll", "greetings", "--to", str(time_ms)).out == ""
    assert cli("poll", "greetings", "--from", "-10m", "--limit", "2").out == "one\ntwo\n"
    assert cli("poll", "greetings", "--from", "now").out == ""
    assert cli("poll", "greetings", "--last", "2").out == "two\nthree\n"
    assert cli("poll", "greetings", "--last", "10", "--limit", "1").out == "one\n"
    assert cli("poll", "greetings", "--from", "now", "--wait", "50ms").out == ""
    assert cli("poll", "greetings", "-f", "%t %i %p", "--limit", "1").out == f"greetings {first} one\n"
    assert cli("poll", "greetings", "-0").out == "one\0two\0three\0"


def test_poll_reads_page_by_page_until_it_is_empty(cli, monkeypatch):
    cli("topic", "create", "numbers")
    cli("publish", "numbers", *map(str, range(25)))
    monkeypatch.setattr("plainsong.cli.read.PAGE_MESSAGES", 10)
    assert len(cli("poll", "numbers").lines) == 10
    everything = cli("poll", "numbers", "--until-empty").lines
    assert everything == [str(number) for number in range(25)]
    assert cli("poll", "numbers", "--limit", "15").lines == everything[:15]
    assert cli("poll", "numbers", "--last", "15").lines == everything[10:]


def test_an_unknown_topic_names_the_nearest(cli, greetings):
    for verb in (("poll", "greeting"), ("publish", "greeting", "x"), ("tail", "greeting"), ("peek", "greeting")):
        said = cli(*verb, code=Exit.NOT_FOUND)
        assert "did you mean 'greetings'?" in said.err, verb
    for verb in (("stats", "greeting"), ("topic", "show", "greeting"), ("reader", "ls", "greeting")):
        assert "did you mean 'greetings'?" in cli(*verb, code=Exit.NOT_FOUND).err, verb


def test_an_unknown_topic_without_a_near_name_says_how_to_create_one(cli):
    assert "plainsong topic create orders" in cli("poll", "orders", code=Exit.NOT_FOUND).err


def test_a_verb_that_removes_does_not_suggest_creating(cli, greetings):
    for verb in (("topic", "delete", "zork"), ("reader", "rm", "zork", "r"), ("producer", "rm", "zork", "p")):
        said = cli(*verb, "--yes" if verb[0] == "topic" else "--json", code=Exit.NOT_FOUND)
        assert "create" not in said.err, verb
        assert "plainsong topic list shows the topics" in said.err
    said = cli("reader", "rm", "greetings", "nobody", code=Exit.NOT_FOUND)
    assert "set" not in said.err
    assert "topic greetings has no readers" in said.err


@pytest.mark.parametrize(
    ("answers", "hint"), [(True, "it is running, and reports above why"), (False, "start one with plainsong serve")]
)
def test_the_hint_for_a_running_daemon_that_is_not_ready_does_not_ask_if_it_runs(cli, monkeypatch, answers, hint):
    found = ProbeResult("http://a", answers=answers, seconds=[0.1], reasons=["10 bytes are free"], detail="refused")
    monkeypatch.setattr("plainsong.cli.ping.ask", lambda *_, **__: [found])
    assert f"hint: {hint}" in cli("doctor", "--ready", code=Exit.UNAVAILABLE).err


def test_errors_are_json_for_programs(cli):
    said = cli("poll", "orders", "--json", code=Exit.NOT_FOUND)
    told = json.loads(said.err)
    assert (told["code"], told["outcome"], told["exit"]) == ("topic_not_found", "not-applied", 4)
    assert "plainsong topic create orders" in told["hint"]


# --- inspection --------------------------------------------------------------------------------------


def test_peek_shows_state_size_and_expiry_in_eighty_columns(cli, greetings):
    cli("publish", "greetings", "long " * 100)
    said = cli("peek", "greetings")
    assert said.lines[0].startswith(f"{greetings[0]['id']}  plain  3 B  expires in 6d 23h")
    assert said.lines[1].split() == [said.lines[1].split()[0], "one"]
    assert max(map(len, said.lines)) <= 80
    assert cli("peek", "greetings", "--last", "2", "--json").rows[0]["payload"] == "three"
    assert len(cli("peek", "greetings", "--limit", "2", "--json").rows) == 2


def test_stats_of_one_topic_and_of_all(cli, greetings):
    cli("topic", "create", "audit")
    heading, audit, row = cli("stats").lines
    assert heading.split() == ["TOPIC", "MESSAGES", "SIZE", "OLDEST", "IN", "OUT", "WAITING", "OPEN", "HIDDEN"]
    assert (audit.split()[:2], row.split()[:2]) == (["audit", "0"], ["greetings", "3"])
    assert cli("stats", "greet*", "--json").json[0]["topic"] == "greetings"
    told = cli("stats", "greetings", "--json").json
    assert (told["messages"], told["newestId"]) == (3, greetings[-1]["id"])
    assert "messages    3\n" in cli("stats", "greetings").out


def test_top_shows_the_topics_once_on_request(cli, greetings):
    lines = cli("top", "--once").lines
    assert lines[0].startswith("plainsong  http://127.0.0.1:")
    assert lines[1].startswith("1 topic, ")
    assert lines[-1].split()[:2] == ["greetings", "3"]
    assert max(map(len, lines)) <= 80
    assert cli("top", "--once", "--json").json["topics"][0]["topic"] == "greetings"


def test_ping_reports_the_time_and_whether_the_daemon_is_ready(cli, running):
    assert cli("doctor", "--ready").out.endswith(f"plainsong {__version__}  ready\n")
    (told,) = cli("doctor", "--ready", "--json", "--count", "2").json
    assert (told["ready"], told["store"], len(told["seconds"])) == (True, "leveldb", 2)
    said = cli("doctor", "--ready", "--url", f"http://127.0.0.1:1,{told['url']}")
    assert [line.split("  ")[1].startswith("no answer") for line in said.lines] == [True, False]


def test_ping_live_accepts_a_daemon_that_is_not_ready_and_nothing_else(alone, tmp_path):
    full = 1 << 50
    with Daemon(tmp_path / "data", f"storage.min_free_bytes={full}") as daemon:
        url = url_of(daemon)
        assert "NOT READY" in alone("doctor", "--ready", "--url", url, code=Exit.UNAVAILABLE).out
        assert alone("doctor", "--live", "--url", url, code=0).out.endswith("  alive\n")
    gone = alone("doctor", "--live", "--url", url, code=Exit.UNAVAILABLE)
    assert "no daemon answers" in gone.err


def test_ping_and_doctor_recognise_a_daemon_that_shows_its_version_only_to_authenticated_clients(alone, tmp_path):
    with Daemon(tmp_path / "data", "security.authentication=required") as daemon:
        url = url_of(daemon)
        assert alone("doctor", "--ready", "--url", url, code=0).out.endswith(
            "(shows its version only to authenticated clients)  ready\n"
        )
        (told,) = alone("doctor", "--ready", "--url", url, "--json", code=0).json
        assert (told["ready"], told["version"]) == (True, None)
        assert "it shows its version only to authenticated clients" in alone("doctor", "--url", url).out


def test_bench_measures_and_cleans_up(cli):
    told = cli("bench", "--time", "100ms", "--size", "10", "--batch", "50", "--threads", "2", "--json").json
    assert [part["what"] for part in told["parts"]] == [
        "publish one",
        "publish one, 2 threads",
        "publish 50 at once",
        "poll in pages",
    ]
    assert all(part["perSecond"] > 0 and 0 < part["p50Seconds"] <= part["p99Seconds"] for part in told["parts"])
    assert cli("topic", "list").out == ""


# --- readers -----------------------------------------------------------------------------------------


def test_readers_are_set_listed_shown_reset_and_forgotten(cli, greetings):
    first, _, third = (row["id"] for row in greetings)
    assert cli("reader", "set", "greetings", "billing", first, "--json").json["visible"] == 2
    heading, row = cli("reader", "ls", "greetings").lines
    assert (heading.split()[0], row.split()[:2]) == ("READER", ["billing", "2"])
    shown = cli("reader", "show", "greetings", "billing").out
    assert first in shown
    assert "2 messages" in shown
    said = cli("reader", "reset", "greetings", "billing", "--to", "now", code=Exit.USAGE)
    assert "billing of greetings will skip 2 messages" in said.err
    assert cli("reader", "reset", "greetings", "billing", "--to", "now", "--yes", "--json").json["position"] == third
    said = cli("reader", "reset", "greetings", "billing", code=Exit.USAGE)
    assert "will read again 3 messages" in said.err
    assert cli("reader", "reset", "greetings", "billing", "-y", "--json").json["visible"] == 3
    cli("reader", "set", "greetings", "billing", str(greetings[0]["publishTimeMs"]))
    assert cli("reader", "show", "greetings", "billing", "--json").json["visible"] == 3
    assert "forgot billing" in cli("reader", "rm", "greetings", "billing").out
    assert cli("reader", "ls", "greetings", "--json").json == []


def test_an_unknown_reader_names_the_nearest(cli, greetings):
    assert "reader set greetings billing oldest" in cli("reader", "show", "greetings", "billing", code=4).err
    cli("reader", "set", "greetings", "billing", "oldest")
    for verb in (("show",), ("rm",), ("reset", "--yes")):
        said = cli("reader", verb[0], "greetings", "biling", *verb[1:], code=Exit.NOT_FOUND)
        assert said.err == "error: topic greetings has no reader 'biling'\nhint: did you mean 'billing'?\n"


# --- doctor ------------------------------------------------------------------------------------------


def test_doctor_examines_everything_and_says_what_a_message_survives(cli, greetings, running):
    said = cli("doctor", "--data-dir", str(running.data_dir), "--json", code=None)
    told = said.json
    looked = {check["what"] for check in told["checks"]}
    assert {"daemon", "sync time", "honesty", "free space", "open files", "clock"} <= looked
    assert (said.code == Exit.FAILED) == any(check["state"] == "bad" for check in told["checks"])
    assert told["survives"].startswith("An acknowledged message survives kill -9")
    assert told["store"] == "leveldb"


def test_doctor_without_a_daemon_checks_the_machine(alone):
    said = alone("doctor", "--no-daemon")
    assert "no ./data here" in said.out
    assert "sync time" in said.out
    # The disk is only a guess, so doctor concludes nothing from it.
    assert said.lines[-1].endswith("give --data-dir to find out about power cuts.")
    assert said.code in (Exit.OK, Exit.FAILED)


def test_doctor_finds_a_daemon_that_is_down(alone):
    said = alone("doctor", "--url", "http://127.0.0.1:1", code=Exit.FAILED)
    assert "BAD   daemon" in said.out
    assert said.err.startswith("error: checks failed: ")
    assert "daemon" in said.err


def test_doctor_warns_of_findings_and_exits_as_without_them(alone, tmp_path):
    with Daemon(tmp_path / "data", "storage.min_free_bytes=1024TiB") as daemon:
        url = url_of(daemon)
        checks = alone("doctor", "--url", url, "--json", code=Exit.FAILED).json["checks"]
        (found, *_) = alone("doctor", "--attention", "--url", url, "--json", code=0).json
    assert (found["kind"], found["text"].startswith("Publishes are refused: ")) == ("low-space", True)
    told = [check for check in checks if check["what"] == "attention"]
    assert {check["state"] for check in told} == {"warning"}
    assert told[0]["says"].startswith("critical: Publishes are refused: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ready", "--attention"), "--ready and --attention exclude each other"),
        (("--ready", "--no-daemon"), "--data-dir, --no-daemon and --bundle are not for --ready"),
        (("--backup-age", "1h"), "are only for --check"),
        (("--live", "--count", "3"), "--count is only for --ready"),
        (("--no-names",), "--config, --log and --no-names are only for --bundle"),
    ],
)
def test_doctor_refuses_options_of_the_other_mode(alone, words, says):
    assert says in alone("doctor", *words, code=Exit.USAGE).err


@pytest.mark.parametrize(
    ("former", "words", "code"),
    [
        (("ping",), ("doctor", "--ready"), Exit.UNAVAILABLE),
        (("ping", "--live"), ("doctor", "--live"), Exit.UNAVAILABLE),
        (("check",), ("doctor", "--check"), 2),
        (("check", "--nonsense"), ("doctor", "--check", "--nonsense"), 3),
        (("attention", "--json"), ("doctor", "--attention", "--json"), Exit.UNAVAILABLE),
    ],
)
def test_a_retired_verb_runs_its_replacement(alone, former, words, code):
    nowhere = ("--url", "http://127.0.0.1:1")
    told, now = alone(*former, *nowhere, code=code), alone(*words, *nowhere, code=code)
    assert (told.out, told.err) == (now.out, now.err)
    assert told.out or told.err


def test_the_help_of_a_retired_verb_is_that_of_its_replacement(alone):
    assert alone("help", "ping", code=0).out == alone("help", "doctor", code=0).out


def test_no_help_shows_a_retired_verb(alone):
    shown = {line.split()[0] for line in alone("--help").lines if line.startswith("  ")}
    assert "doctor" in shown
    assert shown.isdisjoint({"ping", "check", "attention"})


# --- a daemon that is down -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb",
    [
        ("topic", "list"),
        ("publish", "a", "x"),
        ("poll", "a"),
        ("tail", "a"),
        ("peek", "a"),
        ("stats",),
        ("top", "--once"),
        ("reader", "ls", "a"),
        ("bench",),
        ("doctor", "--ready"),
    ],
)
def test_a_daemon_that_is_down_exits_with_5_at_once_and_a_hint(alone, verb):
    said = alone(*verb, "--url", "http://127.0.0.1:1", code=Exit.UNAVAILABLE)
    assert said.err.startswith("error: ")
    assert "start one with plainsong serve" in said.err


def test_the_next_of_several_urls_answers(cli, running):
    urls = f"http://127.0.0.1:1,http://127.0.0.1:{running.address[1]}"
    cli("topic", "create", "a", "--url", urls)
    assert cli("publish", "a", "x", "--url", urls).out.startswith("published 1 message, ")
