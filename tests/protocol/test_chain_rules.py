"""Chained topics: an entry covers every request, and verification detects every manipulation of the topic's rows."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import msgpack
import pytest
from chained_topic import START_MS, ChainedTopic
from model_store import NAME

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import Conflict
from plainsong.protocol.ids import NO_PAYLOAD_PART
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.properties import parse_properties
from plainsong.protocol.records import ChainEnd, Metadata
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.rows import MessageRow, decode_row, encode_row
from plainsong.protocol.topic.asks import (
    Create,
    DescribeChain,
    NoteSetAside,
    Publish,
    PublishUnder,
    Remove,
    RollBackPointer,
    SetProperties,
    Stats,
    StoreUnder,
    Undelete,
)
from plainsong.protocol.topic.chain import COVERING, FOUND, MAX_BYTES, MAX_ROWS, RESTORED, ChainEntry, pieces, row_of
from plainsong.protocol.topic.verify import MAX_FAULTS, KnownHead, Verifier
from storage.inspect.describe import describe


def kinds(verification):
    return [fault.kind for fault in verification.faults]


def busy_topic():
    """Return a topic with content of every kind."""
    topic = ChainedTopic()
    topic.publish(b"one")
    topic.publish(b"two", b"three", attributes=[{"colour": "red"}, {}])
    topic.publish(b"four", b"five", b"six", atomic=True)
    topic.now_ms += 1
    topic.publish_under(7, b"committed")
    topic.publish_under(9, b"undone", b"undone too")
    topic.do(RollBackPointer(9, by_client=True))
    topic.publish(b"last", ttl_s=1000)
    return topic


def test_a_chained_topic_is_verified_with_all_of_its_messages():
    found = busy_topic().verify()
    assert found.is_good
    assert found.messages == 10
    # begin, three requests, two of transactions, a rollback, one more request
    assert found.entries == 8
    assert found.begun is not None


def covered(topic):
    """Return the number of rows that each entry of messages covers, except the chain's first."""
    entries = [ChainEntry.decode(key[-10:], value) for key, value in topic.entries()[1:]]
    return [each.rows for each in entries if each.kind in COVERING]


def plain(*messages, **fields):
    return Publish(PublishRequest(list(messages), **fields), 1)


def test_consecutive_requests_of_one_step_share_an_entry():
    topic = ChainedTopic()
    topic.do(*(plain(b"%d" % number) for number in range(5)), plain(b"a", b"b"))
    assert covered(topic) == [7]
    found = topic.verify()
    assert (found.messages, found.faults) == (7, [])
    topic.publish(b"by itself")
    assert covered(topic) == [7, 1]


def test_a_shared_entry_equals_that_of_one_request_with_all_its_messages():
    one, many = ChainedTopic(), ChainedTopic()
    one.publish(b"a", b"bc", b"d")
    many.do(plain(b"a"), plain(b"bc"), plain(b"d"))
    assert many.entries() == one.entries()
    alone, producers = ChainedTopic(), ChainedTopic()
    alone.do(plain(b"a"), plain(b"b"))
    producers.do(plain(b"a", producer="p", sequence_ids=[4]), plain(b"b", producer="q", sequence_ids=[1]))
    assert producers.entries() == alone.entries()
    assert producers.verify().is_good


def test_requests_that_differ_in_an_entrys_fields_have_entries_of_their_own():
    topic = ChainedTopic()
    topic.do(
        plain(b"a"),
        plain(b"b"),
        plain(b"c", ttl_s=60),
        plain(b"d"),
        plain(b"e", attributes=[{"k": "v"}]),
        plain(b"f", routing_key="r"),
        plain(b"g"),
        PublishUnder(PublishRequest([b"h"], write_pointer=7), 1),
        plain(b"i"),
        plain(b"j"),
    )
    assert covered(topic) == [2, 1, 1, 1, 1, 1, 1, 2]
    found = topic.verify()
    assert (found.messages, found.faults) == (10, [])


def test_a_shared_entry_ends_at_another_request_in_between_and_when_it_is_full():
    topic = ChainedTopic()
    topic.publish_under(7, b"t")
    topic.do(plain(b"a"), RollBackPointer(7), plain(b"b"), plain(b"c"))
    assert covered(topic) == [1, 1, 2]
    assert topic.verify().is_good
    topic = ChainedTopic()
    topic.do(plain(*[b"x"] * (MAX_ROWS - 1)), plain(b"y"), plain(b"z"), plain(b"z"))
    topic.do(plain(b"x" * (MAX_BYTES - 1000)), plain(b"y" * 2000), plain(b"z"))
    assert covered(topic) == [MAX_ROWS, 2, 1, 2]
    assert topic.verify().is_good


def test_a_head_requested_in_the_step_of_a_publish_covers_it_and_later_messages_have_another_entry():
    topic = ChainedTopic()
    _, view, _ = topic.do(plain(b"a"), DescribeChain(), plain(b"b"))
    assert (view.number, covered(topic)) == (2, [1, 1])
    head = KnownHead(view.generation, view.number, view.position, view.link)
    found = topic.verify(head)
    assert (found.known, found.faults) == ("found", [])


def test_a_shared_entry_is_found_again_after_a_cut_at_any_row():
    for rows in range(8):
        topic = ChainedTopic()
        topic.publish(b"before")
        topic.do(plain(b"a"), plain(b"b"), plain(b"c"), plain(b"d", ttl_s=60), plain(b"e"), rows=rows)
        topic.publish(b"behind")
        found = topic.verify()
        assert (found.faults, found.messages) == ([], len(topic.messages()))


def test_a_large_request_has_entries_of_a_bounded_number_of_rows():
    topic = ChainedTopic()
    topic.publish(*[b"x"] * (MAX_ROWS + 1))
    topic.publish(*[b"y" * (MAX_BYTES // 2)] * 3)
    found = topic.verify()
    assert found.is_good
    assert found.messages == MAX_ROWS + 4
    rows = [ChainEntry.decode(key[-10:], value).rows for key, value in topic.entries()[1:]]
    assert rows == [MAX_ROWS, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ([MAX_BYTES], [(0, 1)]),
        ([MAX_BYTES // 2] * 2 + [1], [(0, 2), (2, 3)]),
        ([MAX_BYTES * 2 // 5] * 5, [(0, 2), (2, 4), (4, 5)]),
        ([MAX_BYTES + 1, 1, MAX_BYTES], [(0, 1), (1, 2), (2, 3)]),
        ([0] * (2 * MAX_ROWS + 1), [(0, MAX_ROWS), (MAX_ROWS, 2 * MAX_ROWS), (2 * MAX_ROWS, 2 * MAX_ROWS + 1)]),
    ],
)
def test_an_entry_covers_as_many_rows_as_its_bounds_of_rows_and_bytes_allow(sizes, cut):
    assert pieces(sizes) == cut


def test_a_topic_without_a_chain_has_no_entries_and_the_same_bytes_as_before():
    topic = ChainedTopic(chain="none")
    topic.publish(b"one", b"two")
    assert topic.entries() == []
    assert topic.state.chain is None
    assert b"chain" not in topic.store.tables[Table.METADATA][metadata_key(NAME)]
    assert "chain" not in topic.state.metadata.properties.shown(1)


def test_a_chain_is_a_property_that_is_shown_and_stored_where_it_is_on():
    properties = parse_properties({"chain": "sha256"})
    assert properties.shown(1)["chain"] == "sha256"
    assert parse_properties(properties.stored()) == properties


# --- attacks ----------------------------------------------------------------------------------------


def at(topic, index):
    return topic.messages()[index][0]


@pytest.mark.parametrize("index", range(10))
def test_any_changed_byte_of_any_message_is_found_where_it_is(index):
    known = busy_topic()
    key, value = known.messages()[index]
    for place in range(len(value)):
        topic = busy_topic()
        changed = bytearray(value)
        changed[place] ^= 0x01
        topic.store.tables[Table.MESSAGE][key] = bytes(changed)
        if topic.verify().is_good:
            # The sequence ids of a producer's request are not covered.
            assert not changes_what_readers_get(value, bytes(changed)), (index, place)


def changes_what_readers_get(before, after):
    return row_of(bytes(10), before) != row_of(bytes(10), after)


@pytest.mark.parametrize("index", range(10))
def test_a_removed_message_is_found_and_named(index):
    topic = busy_topic()
    key = at(topic, index)
    del topic.store.tables[Table.MESSAGE][key]
    [fault] = topic.verify().faults
    assert (fault.kind, fault.id) == ("removed", (key[-10:] + NO_PAYLOAD_PART).hex())


def test_an_inserted_message_is_found_and_named():
    topic = busy_topic()
    key, value = topic.messages()[0]
    inserted = key[:-2] + b"\x77\x77"
    topic.store.tables[Table.MESSAGE][inserted] = value
    [fault] = topic.verify().faults
    assert (fault.kind, fault.position) == ("inserted", inserted[-10:])


def test_a_message_after_the_last_entry_is_found():
    topic = busy_topic()
    key, value = topic.messages()[-1]
    topic.store.tables[Table.MESSAGE][key[:-10] + b"\x00\x00\x7f" + key[-7:]] = value
    assert kinds(topic.verify()) == ["inserted"]


def test_faults_beyond_those_that_are_listed_are_counted():
    topic = ChainedTopic()
    for number in range(MAX_FAULTS + 3):
        topic.now_ms += 1
        topic.publish(b"%d" % number)
    for key, value in topic.messages():
        topic.store.tables[Table.MESSAGE][key] = value + b"!"
    found = topic.verify()
    assert (len(found.faults), found.more_faults) == (MAX_FAULTS, 3)


def test_swapped_messages_are_found():
    topic = ChainedTopic()
    topic.publish(b"one", b"two")
    rows = topic.store.tables[Table.MESSAGE]
    first, second = at(topic, 0), at(topic, 1)
    rows[first], rows[second] = rows[second], rows[first]
    [fault] = topic.verify().faults
    assert (fault.kind, fault.position) == ("changed", first[-10:])


def test_a_message_under_another_write_pointer_is_found():
    topic = ChainedTopic()
    topic.publish_under(7, b"one")
    key, value = topic.messages()[0]
    topic.store.tables[Table.MESSAGE][key] = value[:1] + (8).to_bytes(8, "big") + value[9:]
    assert kinds(topic.verify()) == ["changed"]


def test_a_rollback_of_a_message_past_the_topic_is_found():
    topic = busy_topic()
    key, value = topic.messages()[6]
    topic.state.pending.clear()
    topic.store.tables[Table.MESSAGE][key] = value[:1] + (-7).to_bytes(8, "big", signed=True) + value[9:]
    [fault] = topic.verify().faults
    assert (fault.kind, fault.position) == ("hidden", key[-10:])


def test_a_rolled_back_message_that_is_shown_again_is_found():
    topic = busy_topic()
    key, value = topic.messages()[7]
    topic.store.tables[Table.MESSAGE][key] = value[:1] + (9).to_bytes(8, "big") + value[9:]
    [fault] = topic.verify().faults
    assert (fault.kind, fault.position) == ("shown", key[-10:])


@pytest.mark.parametrize("index", range(1, 8))
def test_any_changed_byte_of_an_entry_is_found(index):
    known = busy_topic()
    key, value = known.entries()[index]
    for place in range(len(value)):
        topic = busy_topic()
        changed = bytearray(value)
        changed[place] ^= 0x01
        if place == 1 and decode_row(bytes(changed)) == decode_row(value):
            continue  # the sign of the length, which is meaningless
        topic.store.tables[Table.PAYLOAD][key] = bytes(changed)
        found = topic.verify(known.head())
        assert not found.is_good, (index, place)


def test_a_first_entry_that_follows_something_is_found_where_it_is():
    topic = busy_topic()
    key, value = topic.entries()[0]
    link = ChainEntry.decode(key[-10:], value).link
    topic.store.tables[Table.PAYLOAD][key] = value.replace(link, bytes([1]) * len(link))
    fault = topic.verify().faults[0]
    assert (fault.kind, fault.position) == ("entry-changed", key[-10:])


def test_a_message_that_is_removed_with_its_entry_is_found():
    topic = busy_topic()
    del topic.store.tables[Table.MESSAGE][at(topic, 0)]
    del topic.store.tables[Table.PAYLOAD][topic.entries()[1][0]]
    assert "entry-removed" in kinds(topic.verify())


def test_entries_made_again_from_other_messages_are_found_with_a_known_head():
    """An attacker who can write to the store can forge a consistent chain; only a link stored elsewhere reveals it."""
    honest, forged = ChainedTopic(), ChainedTopic()
    honest.publish(b"pay 100")
    forged.publish(b"pay 900")
    assert forged.verify().is_good
    assert kinds(forged.verify(honest.head())) == ["other-chain"]


def test_a_missing_end_is_found_with_a_later_head():
    topic = busy_topic()
    head = topic.head()
    del topic.store.tables[Table.MESSAGE][at(topic, 9)]
    del topic.store.tables[Table.PAYLOAD][topic.entries()[-1][0]]
    topic.load()
    assert topic.verify().is_good
    assert kinds(topic.verify(head)) == ["cut-off"]


def test_an_older_copy_of_a_store_is_found_with_a_later_head():
    topic = busy_topic()
    older = {table: dict(rows) for table, rows in topic.store.tables.items()}
    topic.publish(b"later")
    head = topic.head()
    topic.store.tables = older
    topic.load()
    assert kinds(topic.verify(head)) == ["cut-off"]
    topic.now_ms += 1
    topic.publish(b"something else")
    assert kinds(topic.verify(head)) == ["other-chain"]


def test_a_known_head_is_found_while_its_entry_exists():
    topic = busy_topic()
    head = topic.head()
    topic.publish(b"later")
    assert topic.verify(head).known == "found"


def test_the_chain_of_another_topic_is_not_accepted_for_this_one():
    topic = busy_topic()
    topic.store.tables[Table.METADATA][metadata_key(NAME)] = replace(topic.state.metadata, generation=1).encode()
    other = KnownHead(2, 1, bytes(10), bytes(32))
    assert "other-chain" in kinds(topic.verify(other))


# --- expiry and cleaning ----------------------------------------------------------------------------


def test_cleaning_keeps_the_last_link_of_dropped_entries():
    topic = ChainedTopic()
    for number in range(5):
        topic.publish(b"%d" % number)
    dropped = topic.head()
    topic.now_ms += 3_601_000
    topic.publish(b"new")
    topic.clean()
    assert len(topic.entries()) == 2
    found = topic.verify(dropped)
    assert found.is_good
    assert (found.messages, found.known, found.begun) == (1, "found", None)


def test_a_head_from_before_the_last_kept_link_cannot_be_compared_and_is_not_a_fault():
    topic = ChainedTopic()
    topic.publish(b"one")
    early = topic.head()
    topic.publish(b"two")
    topic.now_ms += 3_601_000
    topic.clean()
    assert topic.verify(early).known == "cleaned"
    assert topic.verify(early).is_good


def test_the_chain_of_a_topic_that_is_empty_again_continues():
    topic = ChainedTopic()
    topic.publish(b"one")
    topic.now_ms += 3_601_000
    topic.clean()
    topic.load()
    assert topic.state.chain.number == 2
    topic.publish(b"two")
    assert topic.verify().messages == 1


def test_messages_that_expired_by_their_own_time_to_live_leave_their_digests():
    topic = ChainedTopic()
    topic.publish(b"long", b"short", b"short too", b"longer", message_ttls_s=[None, 1, 1, 2])
    assert topic.verify().messages == 4
    topic.now_ms += 1_500
    topic.do(Stats())
    assert topic.verify().messages == 2
    topic.clean()
    assert len(topic.messages()) == 2
    found = topic.verify()
    assert found.is_good
    assert (found.messages, found.expired) == (2, 1)


def test_a_message_that_vanished_before_its_own_time_to_live_is_over_is_found():
    topic = ChainedTopic()
    topic.publish(b"long", b"short", message_ttls_s=[None, 1])
    del topic.store.tables[Table.MESSAGE][at(topic, 1)]
    assert kinds(topic.verify()) == ["removed"]


def test_a_message_before_the_first_entry_that_has_not_expired_is_found():
    """Entries that are dropped too early do not hide the messages that they covered."""
    topic = ChainedTopic()
    for number in range(4):
        topic.publish(b"%d" % number)
    for key, _ in topic.entries()[:3]:
        del topic.store.tables[Table.PAYLOAD][key]
    # The faults: the first remaining entry has not expired; the message before it; and the message that it does not
    # cover.
    assert kinds(topic.verify()) == ["entry-removed"] * 3


def test_a_beginning_removed_with_its_messages_is_found():
    """Cleaning always leaves an expired entry, so an unexpired first entry shows that rows were cut off."""
    topic = ChainedTopic()
    for number in range(4):
        topic.publish(b"%d" % number)
    early, late = topic.entries()[1], topic.head()
    for key, _ in topic.entries()[:3]:
        del topic.store.tables[Table.PAYLOAD][key]
    for key, _ in topic.messages()[:2]:
        del topic.store.tables[Table.MESSAGE][key]
    [fault] = topic.verify().faults
    assert (fault.kind, fault.position) == ("entry-removed", topic.entries()[0][0][-10:])
    assert kinds(topic.verify(late)) == ["entry-removed"]
    entry = ChainEntry.decode(early[0][-10:], early[1])
    known = KnownHead(1, entry.number, entry.position, entry.link)
    assert kinds(topic.verify(known)) == ["entry-removed"]


def test_a_head_whose_entry_expires_while_a_topic_is_being_read_is_not_a_fault():
    topic = ChainedTopic()
    topic.publish(b"0")
    topic.publish(b"1")
    known = topic.head()
    topic.publish(b"2")
    verifier = Verifier(str(NAME), 1, known)
    for key, value in topic.entries()[:1]:
        verifier.entry(key[-10:], value, oldest_ms=0, now_ms=topic.now_ms)
    topic.now_ms += 3_601_000
    topic.publish(b"new")
    topic.clean()
    for key, value in topic.entries()[:1]:
        verifier.entry(key[-10:], value, oldest_ms=topic.state.oldest_ms, now_ms=topic.now_ms)
    found = verifier.end()
    assert (found.faults, found.known) == ([], "cleaned")


def test_a_topic_whose_entries_do_not_reach_its_head_is_found():
    """If a topic's end is removed from a running daemon's store, verification finds it without a stored head."""
    topic = busy_topic()
    head = topic.head()
    del topic.store.tables[Table.MESSAGE][at(topic, 9)]
    del topic.store.tables[Table.PAYLOAD][topic.entries()[-1][0]]
    assert kinds(topic.verify(head=head)) == ["cut-off"]
    assert kinds(topic.verify(head=head._replace(number=head.number - 1))) == ["other-chain"]


def test_a_wrong_time_to_live_of_a_message_is_found_before_cleaning_removes_it():
    topic = ChainedTopic()
    topic.publish(b"one")
    key, _ = topic.messages()[0]
    topic.store.tables[Table.MESSAGE][key] = encode_row(MessageRow(payload=b"one", ttl_s=1))
    topic.now_ms += 1_500
    [fault] = topic.verify().faults
    assert (fault.kind, fault.position) == ("changed", key[-10:])


def test_a_message_in_the_place_of_one_that_has_expired_by_its_own_time_to_live_is_found():
    topic = ChainedTopic()
    topic.publish(b"long", b"short", message_ttls_s=[None, 1])
    key, _ = topic.messages()[1]
    topic.now_ms += 1_500
    topic.clean()
    assert topic.verify().is_good
    topic.store.tables[Table.MESSAGE][key] = encode_row(MessageRow(payload=b"forged"))
    [fault] = topic.verify().faults
    assert (fault.kind, fault.position) == ("changed", key[-10:])


def test_entries_cleaned_while_a_topic_is_being_read_are_not_a_fault():
    topic = ChainedTopic()
    for number in range(4):
        topic.publish(b"%d" % number)
    verifier = Verifier(str(NAME), 1)
    entries = [(key[-10:], value) for key, value in topic.entries()]
    for entry in entries:
        verifier.survey(*entry)
    verifier.entry(*entries[0], oldest_ms=0, now_ms=topic.now_ms)
    topic.now_ms += 3_601_000
    topic.publish(b"new")
    topic.clean()
    for key, value in topic.entries():
        if key == topic.entries()[-1][0]:
            position, row = topic.messages()[0]
            verifier.row(row_of(position[-10:], row), topic.state.oldest_ms)
        verifier.entry(key[-10:], value, oldest_ms=topic.state.oldest_ms, now_ms=topic.now_ms)
    found = verifier.end()
    assert (found.faults, found.messages) == ([], 1)


# --- switching on and off ---------------------------------------------------------------------------


def test_a_chain_that_is_switched_on_later_begins_there_and_says_so():
    topic = ChainedTopic(chain="none")
    topic.publish(b"before")
    topic.publish(b"before", b"too")
    topic.set(chain="sha256")
    topic.publish(b"after")
    found = topic.verify()
    assert found.is_good
    assert (found.before, found.messages) == (3, 1)
    assert found.begun > topic.messages()[0][0][-10:]


def test_a_chain_that_is_switched_off_and_on_continues_from_its_end():
    topic = ChainedTopic()
    topic.publish(b"one")
    known = topic.head()
    topic.set()
    topic.publish(b"not covered", b"nor this")
    topic.load()
    assert topic.state.chain is None
    topic.set(chain="sha256")
    topic.publish(b"two")
    found = topic.verify(known)
    assert found.is_good
    assert (found.messages, found.before, found.known) == (2, 2, "found")
    # begin, one, end, begin, two
    assert topic.state.chain.number == 5


def test_a_new_generation_has_a_new_chain():
    topic = ChainedTopic()
    topic.publish(b"one")
    topic.do(Remove())
    topic.do(Create(topic.state.metadata.properties))
    assert topic.state.chain.number == 1
    topic.publish(b"two")
    assert topic.verify().messages == 1


def test_an_undeleted_topic_continues_its_chain():
    topic = ChainedTopic()
    topic.publish(b"one")
    topic.do(Remove())
    topic.load()
    topic.do(Undelete())
    topic.publish(b"two")
    found = topic.verify()
    assert (found.is_good, found.messages, found.entries) == (True, 2, 3)


def test_a_chain_does_not_begin_while_stored_messages_may_be_published_after_its_beginning():
    topic = ChainedTopic(chain="none")
    topic.do(StoreUnder(PublishRequest([b"stored"], write_pointer=7), 1))
    with pytest.raises(Conflict, match="stored"):
        topic.set(chain="sha256")
    topic.do(PublishUnder(PublishRequest([], write_pointer=7), 1))
    topic.set(chain="sha256")
    assert topic.verify().is_good


def stored_topic():
    """Return a topic with stored messages: under a write pointer, with and without segments, and staged."""
    topic = ChainedTopic()
    topic.store_under(7, b"one", b"two", attributes=[{"colour": "red"}, {}], message_ttls_s=[None, 1])
    topic.store_under(7, b"won", segment="a")
    topic.store_under(7, b"lost", segment="b")
    topic.store_under(7, b"won too", segment="a")
    topic.publish(b"plain")
    topic.store_under(9, b"three")
    topic.store_under(9, b"four", segment="c")
    topic.publish_under(9, b"with them")
    topic.publish_under(7, segments=["a"])
    topic.stage("x", b"staged")
    topic.stage("y", b"given up")
    topic.publish_staged("x", ttl_s=60)
    return topic


def payloads(topic):
    """Return the keys of payload rows, without those of the chain."""
    return [key for key in sorted(topic.store.tables[Table.PAYLOAD]) if not is_entry(key)]


def is_entry(key):
    return key[-18:-10] == bytes(8)


def test_messages_that_were_stored_first_are_verified_where_they_are_published():
    topic = stored_topic()
    found = topic.verify()
    assert found.faults == []
    # The plain message, the three and four stored with one inline, two of the winning segment, and the staged one.
    assert found.messages == 1 + 3 + 2 + 1
    assert covered(topic) == [1, 1, 1, 1, 1]


def test_links_and_the_digest_of_stored_messages_are_made_as_the_page_on_the_format_says():
    topic = ChainedTopic()
    topic.store_under(7, b"one", b"two", segment="a")
    topic.store_under(7, b"lost", segment="b")
    topic.store_under(7, b"three", segment="a", attributes=[{"k": "v"}])
    rows = [(key[-10:], topic.store.tables[Table.PAYLOAD][key]) for key in payloads(topic)]
    link = bytes(32)
    for position, value in (rows[0], rows[1], rows[3]):
        link = sha256(link + position + value).digest()
    assert topic.state.pending[7].segments["a"].link == link
    topic.publish_under(7, segments=["a"])
    ((key, _),) = topic.messages()
    says = [3, 11, rows[0][0], rows[3][0], None, [0], [[0, link]]]
    entry = ChainEntry.decode(key[-10:], topic.entries()[-1][1])
    assert entry.digest == sha256(b"stored" + key[-10:] + msgpack.packb(says)).digest()
    assert (entry.pointer, entry.rows) == (7, 1)


def test_any_changed_byte_of_a_stored_message_that_is_shown_is_found_where_it_is_published():
    topic = stored_topic()
    rows, shown = topic.store.tables[Table.PAYLOAD], 0
    for key in payloads(topic):
        value = rows[key]
        segment = decode_row(value).extras.get("s")
        for index in range(len(value)):
            rows[key] = value[:index] + bytes([value[index] ^ 1]) + value[index + 1 :]
            faults = topic.verify().faults
            if value.endswith((b"lost", b"given up", b"one", b"two")):
                assert len(faults) <= 1  # invisible to readers, unless the change makes it visible
            else:
                assert [fault.kind in ("changed", "removed", "unreadable", "inserted") for fault in faults] == [True]
                shown += 1
        rows[key] = value
        assert segment in (None, 0, 1)
    assert shown > 0
    assert topic.verify().is_good


@pytest.mark.parametrize("end", [b"won too", b"four", b"staged"])
def test_a_stored_message_that_is_removed_is_found(end):
    topic = stored_topic()
    (gone,) = [key for key, value in topic.store.tables[Table.PAYLOAD].items() if value.endswith(end)]
    del topic.store.tables[Table.PAYLOAD][gone]
    assert kinds(topic.verify()) == ["removed"]


def test_inserted_and_swapped_stored_messages_are_found():
    topic = ChainedTopic()
    topic.store_under(7, b"one", b"two", b"three")
    topic.publish_under(7)
    rows = topic.store.tables[Table.PAYLOAD]
    first, second, third = payloads(topic)
    rows[first], rows[second] = rows[second], rows[first]
    assert kinds(topic.verify()) == ["changed"]
    rows[first], rows[second] = rows[second], rows[first]
    assert topic.verify().is_good
    between = second[:-2] + b"\xff\xff"
    moved = third[:-10] + (int.from_bytes(third[-10:], "big") + 65536).to_bytes(10, "big")
    assert second < between < moved
    rows[between] = encode_row(MessageRow(b"new"))
    assert topic.verify().is_good  # after the last published message, so no reader gets it
    del rows[between]
    reference = topic.messages()[0][0]
    value = topic.store.tables[Table.MESSAGE][reference]
    row = decode_row(value)
    row.extras = {**row.extras, "n": 2, "l": second[-10:]}
    topic.store.tables[Table.MESSAGE][reference] = encode_row(row)
    assert kinds(topic.verify()) == ["changed"]


def test_losing_segments_cannot_be_shown_nor_winning_ones_hidden():
    for segments in ([], [1], [0, 1], None):
        topic = ChainedTopic()
        topic.stage("a", b"won")
        topic.stage("b", b"lost")
        topic.publish_staged("a")
        ((key, value),) = topic.messages()
        row = decode_row(value)
        extras = {name: each for name, each in row.extras.items() if name != "g"}
        row.extras = extras if segments is None else {**extras, "g": segments}
        topic.store.tables[Table.MESSAGE][key] = encode_row(row)
        assert not topic.verify().is_good


def test_links_of_stored_messages_continue_after_a_load():
    topic = ChainedTopic()
    topic.store_under(7, b"one", segment="a")
    topic.store_under(7, b"two")
    topic.load()
    topic.store_under(7, b"three", segment="a")
    topic.store_under(7, b"four")
    topic.load()
    topic.publish_under(7)
    found = topic.verify()
    assert (found.messages, found.faults) == (4, [])


def test_a_rollback_of_published_stored_messages_is_an_entry_and_that_of_others_is_not():
    topic = ChainedTopic()
    topic.store_under(7, b"one")
    topic.publish_under(7)
    topic.do(RollBackPointer(7))
    topic.store_under(9, b"two")
    number = topic.state.chain.number
    topic.do(RollBackPointer(9))
    assert topic.state.chain.number == number
    topic.clean()
    found = topic.verify()
    assert (found.messages, found.faults) == (1, [])
    ((key, value),) = topic.messages()
    (turned,) = (each for each, _ in [(value[:1] + (7).to_bytes(8, "big") + value[9:], None)])
    topic.store.tables[Table.MESSAGE][key] = turned
    assert kinds(topic.verify()) == ["shown"]


def test_stored_messages_expire_with_the_time_to_live_of_their_publish_and_not_before():
    topic = ChainedTopic()
    topic.stage("a", b"long", b"short", message_ttls_s=[None, 1])
    topic.publish_staged("a", ttl_s=60)
    topic.now_ms += 2_000
    topic.clean()
    assert len(payloads(topic)) == 2
    assert topic.verify().messages == 2
    topic.now_ms += 60_000
    topic.clean()
    assert payloads(topic) == topic.messages() == []
    found = topic.verify()
    assert (found.messages, found.expired, found.faults) == (0, 1, [])


def test_stored_messages_that_vanished_before_their_publish_expires_are_found():
    topic = ChainedTopic()
    topic.stage("a", b"one")
    topic.publish_staged("a", ttl_s=60)
    del topic.store.tables[Table.PAYLOAD][payloads(topic)[0]]
    assert kinds(topic.verify()) == ["removed"]
    (key, _) = topic.messages()[0]
    del topic.store.tables[Table.MESSAGE][key]
    assert kinds(topic.verify()) == ["removed"]


@pytest.mark.parametrize("rows", range(8))
def test_a_publish_of_stored_messages_that_a_power_cut_left_without_an_entry_gets_one(rows):
    topic = ChainedTopic()
    topic.store_under(7, b"one", segment="a")
    topic.store_under(7, b"lost", segment="b")
    topic.do(PublishUnder(PublishRequest([b"two"], write_pointer=7, segments=["a"]), 1), rows=rows)
    topic.stage("a", b"three")
    topic.do(topic.staged("a"), rows=rows)
    topic.publish(b"behind")
    found = topic.verify()
    assert found.faults == []
    assert found.messages == len(topic.messages())


@pytest.mark.parametrize("rows", range(8))
def test_an_interrupted_store_is_not_part_of_a_later_publish(rows):
    topic = ChainedTopic()
    topic.store_under(7, b"one")
    topic.do(StoreUnder(PublishRequest([b"cut", b"off"], write_pointer=7), 1), rows=rows)
    topic.store_under(7, b"two")
    topic.publish_under(7)
    found = topic.verify()
    assert found.faults == []
    assert found.messages in (2, 4)


def test_a_dry_run_of_a_change_adds_no_entry():
    topic = ChainedTopic()
    topic.do(SetProperties({"ttl": 1}, dry_run=True))
    assert len(topic.entries()) == 1
    assert topic.state.chain is not None


# --- set aside, epochs, crashes ---------------------------------------------------------------------


def test_rows_set_aside_are_in_an_entry_and_not_a_fault():
    topic = busy_topic()
    gone = topic.messages()[3:6]
    topic.do(NoteSetAside(1, gone[0][0][-10:], gone[-1][0][-10:], 3))
    for key, _ in gone:
        del topic.store.tables[Table.MESSAGE][key]
    found = topic.verify()
    assert found.is_good
    assert (found.set_aside, found.messages) == (1, 7)


def test_an_entry_has_the_epoch_of_the_owner_that_wrote_it():
    topic = ChainedTopic()
    topic.state.epoch = topic.state.chain.epoch = 12
    topic.publish(b"one")
    assert [ChainEntry.decode(key[-10:], value).epoch for key, value in topic.entries()] == [0, 12]


@pytest.mark.parametrize("rows", range(1, 9))
def test_rows_that_a_power_cut_left_without_an_entry_get_one_at_the_next_start(rows):
    topic = ChainedTopic()
    topic.publish(b"before")
    asks = [Publish(PublishRequest([b"a", b"b"]), 1), Publish(PublishRequest([b"c", b"d"], ttl_s=10), 1)]
    topic.do(*asks, rows=rows)
    topic.publish(b"behind")
    found = topic.verify()
    assert found.is_good
    assert found.messages == len(topic.messages())
    left = [ChainEntry.decode(key[-10:], value).kind for key, value in topic.entries()].count(FOUND)
    assert found.found == left == (1 if rows < 5 else 1 if rows == 5 else 0)


def test_a_last_entry_that_cannot_be_read_keeps_no_topic_from_being_loaded_and_is_reported():
    topic = busy_topic()
    key, _ = topic.entries()[-1]
    topic.store.tables[Table.PAYLOAD][key] = b"\x00\x00"
    topic.load()
    topic.publish(b"behind")
    found = topic.verify()
    assert (found.faults[0].kind, found.faults[0].position) == ("entry-changed", key[-10:])


def restored(topic, **fields):
    """Load the topic from metadata with these fields, as after a restore."""
    metadata = replace(topic.state.metadata, **fields)
    topic.store.tables[Table.METADATA][metadata_key(NAME)] = metadata.encode()
    topic.load()


def test_a_chain_records_once_that_its_topic_came_from_a_backup_however_often_it_starts():
    topic = ChainedTopic()
    topic.publish(b"one")
    last = topic.entries()[-1][0][-10:]
    restored(topic, restored=last)
    topic.publish(b"two")
    topic.load()
    topic.publish(b"three")
    entries = [ChainEntry.decode(key[-10:], value) for key, value in topic.entries()]
    assert [each.kind == RESTORED for each in entries] == [False, False, True, False, False]
    assert entries[2].last == last
    assert topic.state.metadata.restored is None
    found = topic.verify()
    assert (found.faults, found.restored, found.messages) == ([], 1, 3)


def test_a_chain_without_restored_entries_continues_after_the_end_in_the_metadata():
    topic = ChainedTopic()
    topic.publish(b"one")
    head = topic.head()
    topic.store.tables[Table.PAYLOAD].clear()
    topic.store.tables[Table.MESSAGE].clear()
    restored(topic, chain_end=ChainEnd(head.position, head.number, head.link))
    topic.now_ms += 1
    topic.publish(b"two")
    entries = [ChainEntry.decode(key[-10:], value) for key, value in topic.entries()]
    assert [each.number for each in entries] == [head.number + 1, head.number + 2]
    assert entries[0].follows(head.link)


def test_metadata_keeps_where_a_chain_ended():
    topic = ChainedTopic()
    topic.set()
    metadata = topic.state.metadata
    assert metadata.chain_end.number == 2
    assert Metadata.decode(metadata.encode()) == metadata


def test_the_first_entry_names_its_topic():
    topic = ChainedTopic()
    key, value = topic.entries()[0]
    assert ChainEntry.decode(key[-10:], value).of == (str(NAME), 1)
    assert int.from_bytes(key[-10:-2], "big") == START_MS


def test_entries_are_described_when_a_stopped_store_is_inspected():
    topic = busy_topic()
    found = [describe(Table.PAYLOAD, key, value).shown() for key, value in topic.entries()]
    assert {each["kind"] for each in found} == {"chain-entry"}
    assert [each["number"] for each in found] == list(range(1, 9))
    assert found[-1]["link"] == topic.head().link.hex()
