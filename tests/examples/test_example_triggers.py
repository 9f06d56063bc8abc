"""Custom triggers: one outcome for each relevant notification, in order, whichever process is killed."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plainsong import TEXT, Client, Outgoing
from tests.examples.programs import Program, eventually, kill_now_and_then, lasting_daemon, mortal, run

Values = Callable[..., list[Any]]


def test_attributes_decide_which_commands_run(url: str, namespace: str, values: Values):
    run("custom_triggers", url, "--namespace", namespace)
    outcomes = values(url, namespace, "outcomes")
    assert [[(each["output"], each["exit"]) for each in outcome["runs"]] for outcome in outcomes] == [
        [("changelog: new prices\n", 0)],
        [("smoke tests of 7\n", 0), ("changelog: new prices\n", 0)],
        [("no room on db1\n", 3)],
    ]
    with Client(url, namespace=namespace) as client:
        ids = [str(each.id) for each in client.read("notifications") if each.attributes["kind"] != "chatter"]
    assert [outcome["notification"] for outcome in outcomes] == ids
    assert run("custom_triggers", url, "--namespace", namespace, "outcomes").count("\n") == 3


def test_a_notification_cannot_inject_into_a_shell(url: str, namespace: str, values: Values):
    words = ("--namespace", namespace)
    run("custom_triggers", url, *words, "notify", "x; touch /nowhere $(id)", "kind=deployed", "stage=test")
    run("custom_triggers", url, *words)
    [first, *_] = values(url, namespace, "outcomes")
    assert first["runs"][0]["output"] == "changelog: x; touch /nowhere $(id)\n"


def test_each_notification_has_one_outcome_although_the_server_and_the_daemon_are_killed(
    tmp_path: Path, values: Values
):
    began = tmp_path / "began"
    script = f"echo $NOTIFICATION >> {shlex.quote(str(began))}; echo hello $1"
    rules = tmp_path / "rules.toml"
    rules.write_text(f"[[trigger]]\nwhen = {{ kind = 'greet' }}\nrun = ['sh', '-c', '{script}', 'sh', '$text']\n")
    with lasting_daemon(tmp_path) as (daemon, url), Client(url, namespace="triggers") as client:
        for topic in ("notifications", "outcomes"):
            client.create_topic(topic)
        server = Program(tmp_path / "log", "custom_triggers", url, "--rules", rules, "serve")
        kills = 4
        with mortal(server), client.producer("notifications", "people", serializer=TEXT) as people:
            for number in range(60):
                kind = "greet" if number % 2 else "chatter"
                people.send(Outgoing(str(number), attributes={"kind": kind}))
            people.flush()
            kill_now_and_then(random.Random(13), kills, server, server, daemon)
            eventually("all events are handled", lambda: client.admin.stats("outcomes")["messages"] >= 30)
        assert "Traceback" not in server.said()
        told = values(url, "triggers", "outcomes")
        greeted = [str(each.id) for each in client.read("notifications") if each.attributes["kind"] == "greet"]
    assert [each["notification"] for each in told] == greeted
    assert [each["runs"][0]["output"] for each in told] == [f"hello {number}\n" for number in range(1, 60, 2)]
    begun = began.read_text().split()
    assert list(dict.fromkeys(begun)) == greeted  # in order; only those that a kill interrupted are repeated
    assert len(begun) <= 30 + kills
