"""Planted anomalies of the final state and its order, as clients would have recorded them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

from plainsong.protocol.ids import LAST_BOUND, pack_id
from tests.cluster.history.places import Planters, append, ids_of, into, remove, some_poll, some_transaction, some_write
from tests.cluster.history.records import History, Opening, Write

PLANTERS: Planters = []
plants = into(PLANTERS)


@plants("lost")
def an_acknowledged_request_is_gone(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: write.outcome == "acknowledged")
    remove(history, *(write.payloads if write else ()))
    return write is not None


@plants("lost")
def a_committed_transaction_is_aborted_in_the_end(history: History, rng: Random) -> bool:
    each = some_transaction(history, rng, lambda each: each.committed_s < inf)
    if each:
        each.state = "aborted"
    return each is not None


@plants("vanished")
def a_message_that_was_read_is_gone(history: History, rng: Random) -> bool:
    at = some_poll(history, rng, lambda poll: bool(poll.messages) and not poll.committed)
    if at is not None:
        remove(history, rng.choice(history.polls[at].messages)[1])
    return at is not None


@plants("doubled")
def a_request_that_was_sent_again_is_stored_again(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: write.producer is not None and bool(ids_of(history, write)))
    for payload in write.payloads if write else ():
        append(history, write.topic if write else "", payload)
    return write is not None


@plants("doubled")
def two_messages_have_one_id(history: History, rng: Random) -> bool:
    topic = rng.choice(list(history.logs))
    rows = list(history.logs[topic])
    if len(rows) < 2:
        return False
    at = rng.randrange(1, len(rows))
    rows[at] = (rows[at - 1][0], *rows[at][1:])
    history.logs[topic] = rows
    return True


@plants("doubled")
def a_page_has_a_message_twice(history: History, rng: Random) -> bool:
    at = some_poll(history, rng, lambda poll: bool(poll.messages))
    if at is not None:
        poll = history.polls[at]
        history.polls[at] = replace(poll, messages=(*poll.messages, poll.messages[-1]))
    return at is not None


@plants("doubled")
def two_transactions_have_one_number(history: History, rng: Random) -> bool:
    one, other = rng.sample(history.transactions, 2)
    other.id = one.id
    return True


@plants("doubled")
def a_second_acknowledgement_gives_other_ids(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: bool(write.receipts))
    if write:
        write.receipts.append((LAST_BOUND, LAST_BOUND))
    return write is not None


@plants("applied anyway")
def a_refused_request_is_present(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: write.outcome == "refused" and write.transaction is None)
    for payload in write.payloads if write else ():
        append(history, write.topic if write else "", payload)
    return write is not None


@plants("applied anyway")
def unsent_messages_are_present(history: History, rng: Random) -> bool:
    append(history, rng.choice(list(history.logs)), b"from nowhere")
    return True


@plants("applied anyway")
def an_undone_transaction_is_committed(history: History, rng: Random) -> bool:
    each = some_transaction(history, rng, lambda each: each.undone_s < inf)
    if each:
        each.state, each.asked_s = "committed", 0.0
    return each is not None


@plants("split")
def only_half_of_a_request_is_present(history: History, rng: Random) -> bool:
    def suits(write: Write) -> bool:
        return write.outcome == "unknown" and len(write.payloads) > 1 and bool(ids_of(history, write))

    write = some_write(history, rng, suits)
    remove(history, *(write.payloads[-1:] if write else ()))
    return write is not None


@plants("reordered")
def a_page_is_out_of_order(history: History, rng: Random) -> bool:
    at = some_poll(history, rng, lambda poll: len(poll.messages) > 1)
    if at is not None:
        poll = history.polls[at]
        history.polls[at] = replace(poll, messages=poll.messages[::-1])
    return at is not None


@plants("reordered")
def two_readers_see_two_orders(history: History, rng: Random) -> bool:
    at = some_poll(history, rng, lambda poll: len(poll.messages) > 1)
    if at is not None:
        poll = history.polls[at]
        (one, first), (other, second), *rest = poll.messages
        history.polls[at] = replace(poll, messages=((one, second), (other, first), *rest))
    return at is not None


@plants("reordered")
def sequence_ids_are_stored_in_reverse(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: len(write.sequences) > 1 and bool(ids_of(history, write)))
    if write:
        write.sequences = write.sequences[::-1]
    return write is not None


@plants("reordered")
def a_receipt_has_the_wrong_ids(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: bool(write.receipts))
    if write:
        write.receipts = [(pack_id(1, 0), pack_id(1, 0))]
    return write is not None


@plants("backwards")
def a_later_request_has_a_smaller_id(history: History, rng: Random) -> bool:
    one = some_write(history, rng, lambda write: bool(write.receipts))
    later = [write for write in history.writes if one and write.receipts > one.receipts and write.topic == one.topic]
    if one and later:
        one.began_s = max(write.ended_s for write in later) + 1
        one.ended_s = one.began_s + 1
    return bool(later)


@plants("backwards")
def a_later_transaction_has_a_smaller_number(history: History, rng: Random) -> bool:
    each = some_transaction(history, rng, lambda each: each.id > min(other.id for other in history.transactions))
    if each:
        each.told_s = -1.0
    return each is not None


@plants("behind")
def a_request_gets_ids_that_a_reader_has_passed(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: bool(ids_of(history, write)))
    ids = ids_of(history, write) if write else []
    at = some_poll(
        history, rng, lambda poll: bool(write and poll.topic == write.topic and poll.messages and poll.last > ids[-1])
    )
    if write is None or at is None:
        return False
    write.began_s = history.polls[at].ended_s + 1
    return True


@plants("behind")
def a_page_lacks_a_message_in_the_middle(history: History, rng: Random) -> bool:
    at = some_poll(history, rng, lambda poll: len(poll.messages) > 2)
    if at is not None:
        poll, gone = history.polls[at], rng.randrange(1, len(history.polls[at].messages) - 1)
        history.polls[at] = replace(poll, messages=poll.messages[:gone] + poll.messages[gone + 1 :])
    return at is not None


@plants("forgotten")
def a_producer_gets_less_than_was_acknowledged(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: write.producer is not None and write.outcome == "acknowledged")
    if write is None or write.epoch is None or write.producer is None:
        return False
    at_s, told = write.ended_s, write.sequences[0] - 1
    history.openings.append(Opening(write.producer, write.topic, at_s + 1, at_s + 2, write.epoch + 1, told))
    return True


@plants("foretold")
def a_producer_gets_an_id_it_has_not_sent(history: History, rng: Random) -> bool:
    opening = rng.choice(history.openings)
    history.openings.remove(opening)
    history.openings.append(replace(opening, last_sequence=1 << 40))
    return True


@plants("not fenced")
def a_session_has_the_epoch_of_its_predecessor(history: History, rng: Random) -> bool:
    opening = rng.choice(history.openings)
    history.openings.append(replace(opening, began_s=opening.ended_s + 1, ended_s=opening.ended_s + 2))
    return True


@plants("applied anyway")
def a_committed_transaction_takes_a_further_request(history: History, rng: Random) -> bool:
    def suits(write: Write) -> bool:
        return write.transaction is not None and write.transaction.committed_s < inf and write.outcome == "acknowledged"

    write = some_write(history, rng, suits)
    if write is not None and write.transaction is not None:
        write.began_s = write.transaction.committed_s + 1
        write.ended_s = write.began_s + 1
    return write is not None


@plants("not fenced")
def an_older_session_is_acknowledged(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: write.producer is not None and write.outcome == "acknowledged")
    if write is None or write.epoch is None or write.producer is None:
        return False
    began_s = write.began_s
    history.openings.append(Opening(write.producer, write.topic, began_s - 2, began_s - 1, write.epoch + 1, 1 << 40))
    return True
