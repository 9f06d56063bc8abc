"""The mailbox: every caller is answered once, no caller waits forever, and a full mailbox refuses."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from actors.actor import complete_all
from actors.mailbox import Mailbox, Prepared, Ticket
from plainsong.protocol.errors import Overloaded, Recovering, ShuttingDown
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Describe, Publish


async def receive_batch(mailbox, max_requests, max_bytes, deadline_s=None):
    if not len(mailbox):
        await mailbox.wait(deadline_s)
    return mailbox.take(max_requests, max_bytes)


def publish(size):
    return Publish(PublishRequest([bytes(size)]), size)


async def test_the_caller_gets_the_answer(nursery):
    mailbox = Mailbox(10, 100)
    answers = []

    async def ask():
        answers.append(await mailbox.ask(Describe()))

    nursery.start_soon(ask)
    (ticket,) = await receive_batch(mailbox, 10, 100)
    assert ticket.taken
    ticket.settle("yes")
    await wait_all_tasks_blocked()
    assert answers == ["yes"]


async def test_the_caller_gets_the_error_and_only_the_first_answer_counts():
    mailbox = Mailbox(10, 100)
    ticket = Ticket(Describe())
    mailbox.put(ticket)
    ticket.settle(Overloaded("first"))
    ticket.settle("second")
    with pytest.raises(Overloaded, match="first"):
        await ticket.wait(lambda ticket: None)


async def test_waiting_requests_are_received_together_within_the_bounds():
    mailbox = Mailbox(100, 10_000)
    for _ in range(7):
        mailbox.put(Ticket(publish(10)))
    assert len(await receive_batch(mailbox, 3, 1_000)) == 3
    assert len(await receive_batch(mailbox, 100, 20)) == 2
    assert (len(mailbox), mailbox.bytes) == (2, 20)
    assert len(await receive_batch(mailbox, 100, 1_000)) == 2
    assert (len(mailbox), mailbox.bytes) == (0, 0)


async def test_a_mailbox_full_by_count_refuses_without_waiting():
    mailbox = Mailbox(2, 10_000)
    mailbox.put(Ticket(Describe()))
    mailbox.put(Ticket(Describe()))
    with pytest.raises(Overloaded, match="2 requests"):
        mailbox.put(Ticket(Describe()))
    assert len(mailbox) == 2


async def test_a_mailbox_full_by_bytes_refuses_until_there_is_room():
    mailbox = Mailbox(100, 100)
    mailbox.put(Ticket(publish(60)))
    with pytest.raises(Overloaded, match="60 bytes"):
        mailbox.put(Ticket(publish(41)))
    mailbox.put(Ticket(publish(40)))
    mailbox.put(Ticket(Describe()))
    await receive_batch(mailbox, 1, 1)
    mailbox.put(Ticket(publish(60)))
    assert mailbox.bytes == 100


async def test_one_request_larger_than_the_mailbox_is_accepted_when_nothing_waits():
    mailbox = Mailbox(100, 100)
    mailbox.put(Ticket(publish(1_000)))
    with pytest.raises(Overloaded):
        mailbox.put(Ticket(publish(1)))


async def test_a_refused_request_takes_no_room():
    mailbox = Mailbox(1, 100)
    mailbox.put(Ticket(publish(10)))
    for _ in range(5):
        with pytest.raises(Overloaded):
            mailbox.put(Ticket(publish(10)))
    assert mailbox.bytes == 10


async def test_a_closed_mailbox_delivers_its_content_and_accepts_no_more():
    mailbox = Mailbox(10, 100)
    mailbox.put(Ticket(Describe()))
    mailbox.close()
    mailbox.close()
    with pytest.raises(ShuttingDown):
        await mailbox.ask(Describe())
    assert mailbox.is_closed
    assert len(await receive_batch(mailbox, 10, 100)) == 1
    assert await receive_batch(mailbox, 10, 100) == []


async def test_drained_requests_get_the_reason(nursery):
    mailbox = Mailbox(10, 100)
    told = []

    async def ask():
        try:
            await mailbox.ask(publish(10))
        except Recovering as error:
            told.append(error)

    for _ in range(3):
        nursery.start_soon(ask)
    await wait_all_tasks_blocked()
    mailbox.drain(lambda: Recovering("not now"))
    await wait_all_tasks_blocked()
    assert len(told) == 3
    assert (len(mailbox), mailbox.bytes) == (0, 0)
    mailbox.drain(lambda: Recovering("no receiver"))


async def test_requests_are_refused_while_the_receiver_is_unavailable():
    mailbox = Mailbox(10, 100)
    mailbox.closed_for = lambda: Recovering("the store is unavailable")
    with pytest.raises(Recovering, match="unavailable"):
        mailbox.put(Ticket(Describe()))
    mailbox.closed_for = None
    mailbox.put(Ticket(Describe()))


async def test_a_caller_who_leaves_is_forgotten_and_the_receiver_is_notified(nursery):
    mailbox = Mailbox(10, 100)
    left = []
    mailbox.on_leave = left.append
    with trio.CancelScope() as scope:
        nursery.start_soon(_cancel_when_blocked, scope)
        await mailbox.ask(Describe())
    (ticket,) = await receive_batch(mailbox, 10, 100)
    assert left == [ticket]
    assert ticket.abandoned
    ticket.settle("nobody listens")


async def test_the_current_receiver_is_notified_when_the_caller_leaves(nursery):
    """The receiver may have started, or changed, since the caller asked."""
    mailbox = Mailbox(10, 100)
    left = []
    with trio.CancelScope() as scope:
        nursery.start_soon(_cancel_when_blocked, scope, lambda: setattr(mailbox, "on_leave", left.append))
        await mailbox.ask(Describe())
    assert len(left) == 1


async def _cancel_when_blocked(scope, before=lambda: None):
    await wait_all_tasks_blocked()
    before()
    scope.cancel()


async def test_a_woken_receiver_gets_nothing_and_the_receiver_of_a_closed_mailbox_gets_the_end(nursery):
    mailbox = Mailbox(10, 100)
    received = []

    async def receive():
        while not mailbox.is_closed or len(mailbox):
            received.append(await receive_batch(mailbox, 10, 100))
        received.append("end")

    nursery.start_soon(receive)
    await wait_all_tasks_blocked()
    mailbox.wake()
    await wait_all_tasks_blocked()
    ticket = Ticket(Describe())
    mailbox.put(ticket)
    mailbox.wake()
    mailbox.close()
    await wait_all_tasks_blocked()
    assert received == [[], [ticket], "end"]


async def test_a_deadline_ends_the_wait_of_the_receiver(autojump_clock):
    mailbox = Mailbox(10, 100)
    assert await receive_batch(mailbox, 10, 100, deadline_s=trio.current_time() + 5) == []
    assert trio.current_time() == 5
    mailbox.put(Ticket(Describe()))
    assert len(await receive_batch(mailbox, 10, 100, deadline_s=trio.current_time() - 1)) == 1


def test_a_prepared_answer_is_sent_unchanged_and_any_other_is_converted_when_it_is_sent():
    converted, given = [], []

    def convert(found):
        converted.append(found)
        return f"made of {found!r}"

    answers = [object(), None, ValueError("no")]
    for answer in answers:
        reply = Prepared(convert, given.append)
        reply.prepare(answer)
        reply.settled(answer)
    assert converted == answers
    reply = Prepared(convert, given.append)
    reply.prepare("begun")
    reply.settled("done")
    assert given == [f"made of {answer!r}" for answer in (*answers, "done")]


def test_a_notification_that_raises_does_not_keep_other_callers_from_their_answers(caplog):
    told = []

    def fail(answer):
        raise RuntimeError(answer)

    first, second = Ticket(Describe(), fail), Ticket(Describe(), told.append)
    complete_all([(first, 1), (second, 2)])
    assert told == [2]
    assert "an answer could not be delivered" in caplog.text
