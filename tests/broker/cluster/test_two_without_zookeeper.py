"""Two daemons on one store without a configured cluster: nothing is lost, and each log says once what to do."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import trio
from daemons import TOPICS, daemons

from tests.patience import PATIENCE_S

NO_ENSEMBLE = SimpleNamespace(hosts="", path="")
NUMBER = 5


async def asked(daemon, path, body):
    """Send a request as our client does: retry while the topic changes owners, since nothing happened."""
    with trio.fail_after(PATIENCE_S):
        while True:
            answer = await daemon.http.post(f"{TOPICS}/{path}", json=body)
            if answer.status_code != 503:
                assert answer.status_code == 200, answer.text
                return answer
            assert answer.json()["outcome"] == "not-applied"


async def test_two_daemons_without_zookeeper_on_one_store_report_once_that_they_take_topics_from_each_other(
    monkeypatch, caplog
):
    with caplog.at_level(logging.INFO):
        async with daemons(NO_ENSEMBLE, monkeypatch) as found:
            one, two = await found.start("one"), await found.start("two")
            for turn in range(4):
                for number in range(NUMBER):
                    by = (one, two)[turn % 2]
                    if not turn:
                        await by.call("PUT", f"{TOPICS}/t{number}", json={})
                    await asked(by, f"t{number}/publish", {"messages": [f"{turn}"]})
            for number in range(NUMBER):
                assert [each["payload"] for each in (await asked(one, f"t{number}/poll", {})).json()] == list("0123")
    said = [record for record in caplog.records if record.getMessage() == "another daemon uses this store"]
    assert 1 <= len(said) <= 2  # at most once from each daemon
    assert not [record for record in caplog.records if record.getMessage() == "topic taken over"]
