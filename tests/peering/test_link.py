"""A link: many concurrent calls; each is answered when ready, or fails with its exact outcome."""

from __future__ import annotations

import pytest
import trio
from linked import Caught, echo, linked
from trio.testing import wait_all_tasks_blocked

from broker.link.flow import LinkBroken, Reply
from broker.link.wire import INLINE_BYTES, LinkBounds
from plainsong.protocol.errors import Internal, MessageTooLarge, NoOwner, Overloaded
from plainsong.protocol.names import TopicName


async def test_a_call_is_answered_with_value_and_body():
    async with linked(echo) as pair:
        reply = await pair.link.call("echo", TopicName("a", "b"), b"body")
        assert (reply.value, reply.body) == (TopicName("a", "b"), b"body")
        assert pair.link.under_way == 0


@pytest.mark.parametrize("size", [0, INLINE_BYTES, INLINE_BYTES + 1, 3_000_000])
async def test_bodies_of_any_size_travel_both_ways(size):
    async with linked(echo) as pair:
        body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert (await pair.link.call("echo", None, body)).body == body


async def test_answers_arrive_in_the_order_in_which_they_are_ready():
    gates = {number: trio.Event() for number in range(3)}
    order = []

    async def gated(call):
        await gates[call.value].wait()
        return Reply(call.value)

    async def one(link, number):
        order.append((await link.call("gated", number)).value)

    async with linked(gated) as pair, trio.open_nursery() as nursery:
        for number in gates:
            nursery.start_soon(one, pair.link, number)
        for number in (2, 0, 1):
            await wait_all_tasks_blocked()
            gates[number].set()
    assert order == [2, 0, 1]


async def test_a_thousand_calls_are_under_way_at_once():
    gate = trio.Event()
    under_way = 0

    async def held(call):
        nonlocal under_way
        under_way += 1
        await gate.wait()
        return Reply(call.value)

    async with linked(held) as pair:
        got = []

        async def one(number):
            got.append((await pair.link.call("held", number)).value)

        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(one, number)
            await wait_all_tasks_blocked()
            assert under_way == 1000
            gate.set()
    assert sorted(got) == list(range(1000))


# --- errors ----------------------------------------------------------------------------------------


async def test_a_remote_error_is_raised_here_as_it_was_there():
    async def refuses(call):
        raise MessageTooLarge(f"message {call.value}", hint="smaller")

    async with linked(refuses) as pair:
        with pytest.raises(MessageTooLarge, match="message 7") as caught:
            await pair.link.call("publish", 7)
    assert (caught.value.outcome, caught.value.hint) == ("not-applied", "smaller")


async def test_a_remote_bug_is_logged_there_and_raised_as_one(caplog):
    async def falls(call):
        raise RuntimeError("secret")

    async with linked(falls) as pair:
        with pytest.raises(Internal) as caught:
            await pair.link.call("x", None)
    assert caught.value.outcome == "unknown"
    assert "secret" not in caught.value.detail + caught.value.hint
    assert "secret" in caplog.text


async def test_an_answer_that_cannot_be_encoded_is_a_bug_there():
    async def odd(call):
        return Reply(object())

    async with linked(odd) as pair:
        with pytest.raises(Internal):
            await pair.link.call("x", None)
        with pytest.raises(TypeError):
            await pair.link.call("x", object())
        assert pair.link.under_way == 0


# --- leaving ---------------------------------------------------------------------------------------


async def test_a_caller_that_leaves_cancels_its_call_there():
    begun, cancelled = trio.Event(), trio.Event()

    async def waits(call):
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with linked(waits) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.link.call, "poll", None)
            await begun.wait()
            nursery.cancel_scope.cancel()
        await cancelled.wait()
        assert pair.link.under_way == 0


async def test_an_accepted_call_still_happens_when_the_caller_leaves():
    begun, gate, done = trio.Event(), trio.Event(), trio.Event()

    async def takes(call):
        begun.set()
        with trio.CancelScope(shield=True):  # as a topic does with a request it has accepted
            await gate.wait()
            done.set()
        return Reply()

    async with linked(takes) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.link.call, "publish", None)
            await begun.wait()
            nursery.cancel_scope.cancel()
        gate.set()
        await done.wait()


async def test_the_remaining_time_travels_with_a_call(autojump_clock):
    seen = []

    async def looks(call):
        seen.append(call.deadline_s - trio.current_time())
        return Reply()

    async with linked(looks) as pair:
        await trio.sleep(100)
        await pair.link.call("look", None, deadline_s=trio.current_time() + 5)
    assert seen == [pytest.approx(5, abs=0.01)]


async def test_a_deadline_ends_the_call_on_both_sides(autojump_clock):
    cancelled = trio.Event()

    async def waits(call):
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with linked(waits) as pair:
        begun_s = trio.current_time()
        with pytest.raises(LinkBroken, match="in time") as caught:
            await pair.link.call("poll", None, deadline_s=begun_s + 3)
        assert caught.value.sent
        assert trio.current_time() - begun_s == pytest.approx(3, abs=0.01)
        await cancelled.wait()


# --- the end of a link -----------------------------------------------------------------------------


async def test_a_call_that_waits_when_its_link_breaks_reports_that_it_was_sent():
    begun = trio.Event()

    async def waits(call):
        begun.set()
        await trio.sleep_forever()

    async with linked(waits) as pair:
        caught_one = Caught()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caught_one.run, pair.link.call("x", None))
            await begun.wait()
            await pair.theirs.aclose()
        assert caught_one.error.sent
        with pytest.raises(LinkBroken) as caught:
            await pair.link.call("x", None)
        assert not caught.value.sent
        assert not pair.link.is_open


async def test_a_call_that_was_never_written_was_not_sent():
    async with linked(echo) as pair:
        await pair.link.call("echo", 1)
        pair.mine.send_stream.send_all_hook = trio.sleep_forever  # the connection accepts no more bytes
        outcomes = []

        async def one(size):
            try:
                await pair.link.call("echo", None, bytes(size))
            except LinkBroken as broken:
                outcomes.append((size, broken.sent))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 1)
            await wait_all_tasks_blocked()
            nursery.start_soon(one, 2)  # queued after the blocked send
            nursery.start_soon(one, 1_000_000)
            await wait_all_tasks_blocked()
            pair.link.cut()
        assert sorted(outcomes) == [(1, True), (2, False), (1_000_000, False)]


async def test_a_body_whose_last_piece_was_not_written_was_not_sent():
    called = []

    async def notes(call):
        called.append(len(call.body))
        return Reply()

    async with linked(notes) as pair:
        sent = 0

        async def some() -> None:
            nonlocal sent
            sent += 1
            if sent > 3:
                await trio.sleep_forever()

        pair.mine.send_stream.send_all_hook = some
        caught = Caught()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caught.run, pair.link.call("x", None, bytes(40_000_000)))
            await wait_all_tasks_blocked()
            pair.link.cut()
        assert isinstance(caught.error, LinkBroken)
        assert not caught.error.sent
        assert called == []


async def test_a_peer_that_leaves_answers_calls_in_progress_and_gets_no_more():
    gate, begun = trio.Event(), trio.Event()

    async def held(call):
        begun.set()
        await gate.wait()
        return Reply("done")

    async with linked(held) as pair:
        got = []

        async def one():
            got.append((await pair.link.call("x", None)).value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await begun.wait()
            pair.stop.set()
            await wait_all_tasks_blocked()
            with pytest.raises(LinkBroken, match="leaving") as caught:
                await pair.link.call("x", None)
            assert not caught.value.sent
            gate.set()
        await pair.served_ended.wait()
        assert got == ["done"]


async def test_closing_waits_for_calls_in_progress():
    gate, begun = trio.Event(), trio.Event()

    async def held(call):
        begun.set()
        await gate.wait()
        return Reply("done")

    async with linked(held) as pair:
        got = []

        async def one():
            got.append((await pair.link.call("x", None)).value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await begun.wait()
            nursery.start_soon(pair.link.aclose)
            await wait_all_tasks_blocked()
            gate.set()
        await pair.served_ended.wait()
        assert got == ["done"]


# --- bounds ----------------------------------------------------------------------------------------


async def test_calls_over_the_bound_are_refused_and_did_not_happen():
    async def waits(call):
        await trio.sleep_forever()

    few = LinkBounds(requests=2)
    for mine, theirs in ((few, LinkBounds()), (LinkBounds(), few)):
        async with linked(waits, mine, theirs) as pair, trio.open_nursery() as nursery:
            nursery.start_soon(pair.link.call, "x", 1)
            nursery.start_soon(pair.link.call, "x", 2)
            await wait_all_tasks_blocked()
            with pytest.raises(Overloaded) as caught:
                await pair.link.call("x", 3)
            assert caught.value.outcome == "not-applied"
            nursery.cancel_scope.cancel()


async def test_bytes_over_the_bound_are_refused_and_a_large_body_is_sent_alone():
    gate = trio.Event()

    async def held(call):
        await gate.wait()
        return Reply(len(call.body))

    few = LinkBounds(bytes=1000)
    for mine, theirs in ((few, LinkBounds()), (LinkBounds(), few)):
        gate = trio.Event()
        async with linked(held, mine, theirs) as pair, trio.open_nursery() as nursery:
            nursery.start_soon(pair.link.call, "x", 1, bytes(400_000))
            await wait_all_tasks_blocked()
            for size in (10, 200_000):
                with pytest.raises(Overloaded):
                    await pair.link.call("x", 2, bytes(size))
            gate.set()
            await wait_all_tasks_blocked()
            assert (await pair.link.call("x", 2, bytes(10))).value == 10


async def test_a_refused_call_can_be_followed_by_others():
    async def refuses(call):
        raise NoOwner("not here")

    async with linked(refuses) as pair:
        for _ in range(100):
            with pytest.raises(NoOwner):
                await pair.link.call("x", None, bytes(100_000))
        assert pair.link.under_way == 0
