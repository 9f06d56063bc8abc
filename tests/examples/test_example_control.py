"""Control messages: every addressed container obeys, in the same order, even across restarts of the daemon."""

from __future__ import annotations

from pathlib import Path

from plainsong import TEXT, Client
from tests.examples.programs import Program, eventually, lasting_daemon, mortal, run


def answers(client: Client) -> list[tuple[str, str, str | None]]:
    """Return each answer's container, text and the message that it answers."""
    return [
        (each.attributes["container"], each.value, each.attributes.get("to"))
        for each in client.read("answers", serializer=TEXT)
    ]


def test_all_addressed_containers_obey_in_one_order(url: str, namespace: str):
    run("control_messages", url, "--namespace", namespace)
    with Client(url, namespace=namespace) as client:
        sent = {str(each.id): each.value for each in client.read("control", serializer=TEXT)}
        told = answers(client)
        seconds = [(each.expires_ms or 0) - each.publish_time_ms for each in client.admin.messages("control")]
    assert list(sent.values()) == ["log-level debug", "pause", "resume", "stop"]
    assert seconds == [60_000] * 4
    for name, obeyed in (("web-1", list(sent)), ("web-2", list(sent)), ("worker-1", list(sent)[1:])):
        own = [(said, to) for who, said, to in told if who == name]
        assert own == [("ready", None), *((f"{sent[each]}: done", each) for each in obeyed)]


def test_containers_continue_through_restarts_of_the_daemon(tmp_path: Path):
    with lasting_daemon(tmp_path) as (daemon, url), Client(url, namespace="control") as client:
        names = [f"web-{number}" for number in range(3)]
        containers = [
            Program(tmp_path / name, "control_messages", url, "container", name, "--program", "web") for name in names
        ]
        stranger = Program(tmp_path / "other", "control_messages", url, "container", "other", "--app", "bakery")
        with mortal(*containers, stranger):
            eventually("all are ready", lambda: "answers" in client.topics() and len(answers(client)) == 4)
            commands = ["one", "two", "stop"]
            for command in commands:
                if command != "one":
                    daemon.kill()
                    daemon.start()
                run("control_messages", url, "send", command, "--answers", "3")
            assert [container.wait() for container in containers] == [0, 0, 0]
            assert not stranger.ended
        obeyed = [(name, f"{command}: done") for name in names for command in commands]
        told = [(name, said) for name, said, to in answers(client) if to is not None]
    assert sorted(set(told)) == sorted(obeyed)
    for name in names:
        assert list(dict.fromkeys(said for who, said in told if who == name)) == [f"{each}: done" for each in commands]
