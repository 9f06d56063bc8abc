"""The lag of readers with a stored position, and of readers that only name themselves in polls."""

from __future__ import annotations

from broker_in_process import TOPICS

from broker.api.messages.readers import MAX_NAMED, NAMED_MS

LAG = f"{TOPICS}/t/lag"


async def poll_as(daemon, reader, **body):
    headers = {"Plainsong-Reader": reader}
    answer = await daemon.call("POST", f"{TOPICS}/t/poll", json=body, headers=headers)
    return answer.headers["plainsong-last-id"]


async def lags(daemon):
    return {each["name"]: each for each in (await daemon.call("GET", LAG)).json()["readers"]}


async def test_a_reader_that_names_itself_is_listed_at_the_end_of_its_last_poll(daemon):
    await daemon.create()
    assert await lags(daemon) == {}
    await daemon.publish("a", "b", "c")
    published_ms = daemon.clock.ms
    daemon.clock.ms += 5_000
    position = await poll_as(daemon, "billing", limit=1)
    assert await lags(daemon) == {
        "billing": {
            "name": "billing",
            "kind": "named",
            "position": position,
            "visible": 2,
            "hidden": 0,
            "expiredUnread": 0,
            "estimated": False,
            "lagMs": 5_000,
            "lastSeenMs": published_ms + 5_000,
            "by": "anonymous",
        }
    }
    await poll_as(daemon, "billing", startFrom=position, inclusive=False)
    (shown,) = (await lags(daemon)).values()
    assert (shown["visible"], shown["lagMs"]) == (0, 0)


async def test_stored_readers_are_listed_and_one_reader_or_a_page_can_be_requested(daemon):
    await daemon.create()
    first, _ = await daemon.publish("a", "b")
    await daemon.call("PUT", f"{TOPICS}/t/readers/kept", json={"position": first})
    await poll_as(daemon, "named")
    await poll_as(daemon, "kept")  # its stored position counts
    found = await lags(daemon)
    assert {name: (each["kind"], each["visible"], each["by"]) for name, each in found.items()} == {
        "kept": ("kept", 1, None),
        "named": ("named", 0, "anonymous"),
    }
    for name in found:
        assert (await daemon.call("GET", f"{LAG}?reader={name}")).json() == found[name]
    page = (await daemon.call("GET", f"{LAG}?limit=1")).json()
    assert page == {"readers": [found["kept"]], "total": 2, "next": "kept"}
    page = (await daemon.call("GET", f"{LAG}?limit=1&after=kept")).json()
    assert page == {"readers": [found["named"]], "total": 2, "next": None}
    for limit in ("0", "1001", "few"):
        await daemon.call("GET", f"{LAG}?limit={limit}", status=400, code="invalid_parameter")
    await daemon.call("GET", f"{LAG}?reader=nobody", status=404, code="not_found")
    await daemon.call("GET", f"{LAG}?reader=a.b", status=400, code="invalid_name")
    await daemon.call("GET", f"{TOPICS}/missing/lag", status=404, code="topic_not_found")


async def test_undecided_messages_are_hidden_and_none_is_visible_after_them(daemon):
    await daemon.create()
    await daemon.publish("a")
    await poll_as(daemon, "billing")
    begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
    body = {"messages": ["b"], "transactionWritePointer": begun["writePointer"]}
    await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    await daemon.publish("c")
    shown = (await lags(daemon))["billing"]
    assert (shown["visible"], shown["hidden"], shown["lagMs"]) == (0, 2, 0)


async def test_a_reader_is_forgotten_after_an_hour_and_a_thousand_are_remembered(daemon):
    await daemon.create()
    await daemon.publish("a")
    for number in range(MAX_NAMED + 1):
        await poll_as(daemon, f"r{number}")
    found = await lags(daemon)
    assert len(found) == MAX_NAMED
    assert "r0" not in found
    daemon.clock.ms += NAMED_MS
    await poll_as(daemon, "r5")
    assert (await lags(daemon)).keys() == {"r5"}


async def test_an_invalid_name_is_refused_and_nothing_is_remembered(daemon):
    await daemon.create()
    await daemon.publish("a")
    for name in ("a.b", "", "x" * 256, "a/b"):
        await daemon.call(
            "POST",
            f"{TOPICS}/t/poll",
            json={},
            headers={"Plainsong-Reader": name},
            status=400,
            code="invalid_name",
        )
    assert await lags(daemon) == {}
