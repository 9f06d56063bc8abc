"""Notifications: users get all messages of their subscriptions, even missed ones; duplicates only after kills."""

from __future__ import annotations

from pathlib import Path

from plainsong import JSON, Client
from tests.examples.programs import Program, eventually, mortal, run

EVENTS = {"events-metadata": 2, "events-programs": 4, "events-data": 2}


def seen_by(said: str, user: str) -> list[str]:
    """Return the topics and contents shown to a user."""
    return [line.split(maxsplit=2)[2] for line in said.splitlines() if line.startswith(user)]


def test_each_user_sees_the_requested_notifications(url: str, namespace: str):
    said = run("notifications", url, "--namespace", namespace)
    with Client(url, namespace=namespace) as client:
        happened = [(each.topic, each.value) for topic in EVENTS for each in client.read(topic, serializer=JSON)]
    assert len(happened) == sum(EVENTS.values())
    assert sorted(seen_by(said, "ada")) == sorted(f"{topic:<16} {value}" for topic, value in happened)
    assert seen_by(said, "grace") == ["events-programs  {'program': 'join', 'state': 'failed'}"]
    assert sorted(seen_by(said, "linus")) == sorted(
        f"{topic:<16} {value}" for topic, value in happened if topic != "events-programs"
    )
    assert len(said.splitlines()) == 8 + 1 + 4


def test_a_user_sees_missed_notifications_and_none_twice(url: str, namespace: str):
    run("notifications", url, "--namespace", namespace)
    assert run("notifications", url, "--namespace", namespace, "inbox") == ""
    for _ in range(2):
        run("notifications", url, "--namespace", namespace, "happen")
    said = run("notifications", url, "--namespace", namespace, "inbox", "ada", "grace")
    assert [len(seen_by(said, user)) for user in ("ada", "grace", "linus")] == [16, 2, 0]


def test_an_inbox_that_follows_shows_what_arrives_and_after_a_kill_repeats_the_last_at_most(
    url: str, namespace: str, tmp_path: Path
):
    words = ("--namespace", namespace, "--follow", "inbox", "ada")
    inbox = Program(tmp_path / "log", "notifications", url, *words)
    with mortal(inbox):
        for times in (1, 2):
            run("notifications", url, "--namespace", namespace, "happen")
            eventually("ada has seen it", lambda times=times: len(set(lines(inbox))) == 8 * times)
            inbox.kill()
            inbox.start()
        run("notifications", url, "--namespace", namespace, "happen")
        eventually("ada has seen all", lambda: len(set(lines(inbox))) == 24)
    assert 24 <= len(lines(inbox)) <= 24 + 2


def lines(inbox: Program) -> list[str]:
    """Return the lines shown, each with its message's id."""
    return inbox.said().splitlines()
