"""Pages with stored messages: the original's defects in reading, by number, and the guarantees to readers."""

from __future__ import annotations

import pytest
from transactional_topic import (
    PREFIX,
    START_MS,
    Entry,
    Topic,
    check_page,
    committed,
    ids_around,
    inline,
    plain,
    stored,
)

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import FIRST_BOUND, LAST_BOUND, NO_PAYLOAD_PART, after, pack_id, pack_position
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import HIDDEN_COUNTED
from plainsong.protocol.rows import MessageRow, encode_row
from plainsong.protocol.topic.reading import Paging

SEEN = committed()


def payloads(page):
    return [payload for _, payload in page.messages()]


def read_on(topic, since, limit, view=SEEN):
    """Return all payloads, page by page, each page starting after the last message of the previous one."""
    got = []
    while True:
        page = topic.from_store(topic.span(since), limit, view=view)
        got += payloads(page)
        if page.end != "more":
            return got
        since = after(page.last_id)


# --- the original's read path, 4.4, 4.1 and 3.2 ---------------------------------------------------


@pytest.mark.parametrize("limit", range(1, 24))
def test_paging_exclusively_through_stored_messages_loses_none(limit):
    """4.4.1: the page's limit counted the dropped row, and the rest of the transaction was skipped."""
    topic = Topic([stored(0, 7, 20), plain(1), plain(2)])
    assert read_on(topic, FIRST_BOUND, limit) == [b"s%d" % index for index in range(20)] + [b"plain"] * 2


@pytest.mark.parametrize("limit", [1, 2, 3, 10])
def test_a_reader_past_a_plain_message_gets_all_stored_messages_after_it(limit):
    """4.4.2: the first stored message was dropped instead of the plain one read before."""
    topic = Topic([plain(0), stored(1, 7, 3)])
    assert read_on(topic, after(topic.messages[0].message_id), limit) == [b"s0", b"s1", b"s2"]


def test_an_expired_start_hides_nothing_that_follows():
    """4.4.3: the expired row and its position among stored messages were applied to live ones."""
    topic = Topic([stored(0, 7, 5), stored(1_000, 8, 5)])
    span = topic.span(after(topic.messages[3].message_id), oldest_ms=START_MS + 1)
    assert payloads(topic.from_store(span, view=SEEN)) == [b"s0", b"s1", b"s2", b"s3", b"s4"]


@pytest.mark.parametrize("view", [committed(), committed(invalid=[7])], ids=["rolled back", "invalid"])
def test_a_start_inside_skipped_messages_hides_nothing_that_follows(view):
    """4.4.4: the position inside a skipped transaction was applied to the next one."""
    sign = -1 if view.verdict(7) == 0 else 1
    topic = Topic([stored(0, sign * 7, 5), stored(1, 8, 5)])
    for start in topic.messages[:5]:
        page = topic.from_store(topic.span(after(start.message_id)), view=view)
        assert payloads(page) == [b"s0", b"s1", b"s2", b"s3", b"s4"]
        assert {each[:8] for each, _ in page.messages()} == {pack_id(START_MS + 1, 0)[:8]}


def test_inclusive_and_exclusive_starts_differ_by_exactly_one_message():
    topic = Topic([plain(0), stored(1, 7, 3), inline(2, 8), plain(3)])
    everything = [each.message_id for each in topic.messages]
    for index, start in enumerate(everything):
        assert [each for each, _ in topic.from_store(topic.span(start), view=SEEN).messages()] == everything[index:]
        behind = topic.from_store(topic.span(after(start)), view=SEEN)
        assert [each for each, _ in behind.messages()] == everything[index + 1 :]


def test_the_id_of_a_removed_message_is_a_valid_position():
    """4.4: the first row was dropped whether or not it was the starting position."""
    topic = Topic([plain(0), stored(2, 7, 3), plain(4)])
    for start in (pack_id(START_MS + 1, 9), pack_id(START_MS + 1, 0, 5, 5), pack_id(START_MS + 2, 0)):
        assert payloads(topic.from_store(topic.span(after(start)), view=SEEN)) == [b"s0", b"s1", b"s2", b"plain"]
    middle = topic.messages[2].message_id
    between = middle[:18] + (int.from_bytes(middle[18:], "big")).to_bytes(2, "big")
    assert payloads(topic.from_store(topic.span(after(between)), view=SEEN)) == [b"s2", b"plain"]


def test_stored_messages_live_as_long_as_their_publish():
    """4.1: payload rows expired by the time at which they were written."""
    topic = Topic([stored(1_000, 7, 4), plain(1_001)])
    assert all(each.message_id[10:18] < each.message_id[:8] for each in topic.messages[:4]), "written before"
    assert len(payloads(topic.from_store(topic.span(oldest_ms=START_MS + 1_000), view=SEEN))) == 5
    assert payloads(topic.from_store(topic.span(oldest_ms=START_MS + 1_001), view=SEEN)) == [b"plain"]


def test_their_own_ttl_and_that_of_the_publish_count_from_the_publish_and_the_shortest_wins():
    topic = Topic([stored(0, 7, 3, ttl_s=5, ttls_s=[None, 2, 60])])
    for now, wanted in ((2_000, 3), (2_001, 2), (5_000, 2), (5_001, 0)):
        assert len(payloads(topic.from_store(topic.span(now_ms=START_MS + now), view=SEEN))) == wanted


def test_unpublished_stored_messages_are_invisible():
    """3.2: rows directly before and after the published ones are on no page."""
    topic = Topic([plain(0), stored(1, 7, 3, orphans=3), plain(2)])
    for view in (None, SEEN):
        assert payloads(topic.from_store(topic.span(), view=view)) == [b"plain", b"s0", b"s1", b"s2", b"plain"]


# --- where a page may end and start ---------------------------------------------------------------


def test_an_end_inside_stored_messages_excludes_exactly_the_message_and_all_after_it():
    topic = Topic([plain(0), stored(1, 7, 4), plain(2)])
    everything = [each.message_id for each in topic.messages]
    for until in [*ids_around(topic), LAST_BOUND]:
        for start in ids_around(topic):
            span = topic.span(start, until)
            got = [each for each, _ in topic.from_store(span, view=SEEN).messages()]
            assert got == [each for each in everything if start <= each < until]


def test_only_the_listed_segments_are_ever_part_of_the_topic():
    kinds = [0, 1, None, 0, 300, 1]
    topic = Topic([stored(0, 7, 6, segments=kinds, winners=[1, 300]), plain(1)])
    for view in (None, SEEN):
        for chunk in (1, 2, 10):
            page = topic.from_store(topic.span(), view=view, chunk=chunk)
            assert payloads(page) == [b"s1", b"s4", b"s5", b"plain"]
    nobody = Topic([stored(0, 7, 6, segments=kinds, winners=[]), plain(1)])
    assert payloads(nobody.from_store(nobody.span())) == [b"plain"]
    unlisted = Topic([stored(0, 7, 6, segments=kinds), plain(1)])
    assert len(payloads(unlisted.from_store(unlisted.span()))) == 7


def test_a_page_that_ends_inside_a_large_transaction_reads_no_more_than_it_needs():
    topic = Topic([stored(0, 7, 5_000), *(plain(ms) for ms in range(1, 2_000))])
    read = dict.fromkeys(Table, 0)
    paging = Paging(topic.span(topic.messages[100].message_id), 10, 10**9, SEEN)
    for table, start, stop, feed, _ in paging.scans():
        assert paging.wanted <= 12  # one row after the limit detects more, and one may precede the start
        for row in topic.tables[table].walk(start, stop, reverse=False):
            read[table] += 1
            if not feed([row]):
                break
    assert paging.page().count == 10
    assert read == {Table.MESSAGE: 1, Table.PAYLOAD: 11, Table.METADATA: 0}


# --- held -----------------------------------------------------------------------------------------


def test_a_reader_stops_before_the_first_undecided_message_with_its_pointer_age_and_hidden_count():
    topic = Topic([plain(0), inline(1, 5), inline(2, -6), inline(3, 9), plain(4), inline(5, 9), stored(6, 8, 3)])
    page = topic.from_store(topic.span(), view=committed(open_=[9]))
    assert payloads(page) == [b"plain", b"inline"]
    assert (page.end, page.held.write_pointer, page.held.since_ms) == ("held", 9, START_MS + 3)
    assert page.held.hidden_messages == 6, "the undecided ones and what comes behind them"
    assert page.last_id < pack_id(START_MS + 3, 0) == after(page.last_id)
    again = topic.from_store(topic.span(after(page.last_id)), view=committed(open_=[9]))
    assert (again.count, again.held) == (0, page.held)
    assert payloads(topic.from_store(topic.span(after(page.last_id)), view=SEEN))[0] == b"inline"


def test_hidden_messages_are_those_the_reader_would_read_next():
    entries = [
        inline(0, 9),
        inline(1, -6),
        inline(2, 7),
        plain(3, ttl_s=1),
        stored(4, 8, 5, ttls_s=[1, 1, None, None, 9]),
    ]
    topic = Topic(entries)
    page = topic.from_store(topic.span(now_ms=START_MS + 1_005), view=committed(open_=[9], invalid=[7]))
    assert page.held.hidden_messages == 1 + 3


@pytest.mark.parametrize("more", [999, 1_000, 1_001, 3_000])
@pytest.mark.parametrize("chunk", [7, 1_000])
def test_hidden_messages_are_counted_up_to_a_thousand_and_one(more, chunk):
    topic = Topic([inline(0, 9), *(plain(1 + ms) for ms in range(more))])
    page = topic.from_store(topic.span(), view=committed(open_=[9]), chunk=chunk)
    assert page.held.hidden_messages == min(1 + more, HIDDEN_COUNTED)
    assert topic.from_cache(topic.cache(50), topic.span(), view=committed(open_=[9])).held == page.held
    behind = Topic([inline(0, 9), stored(1, 8, more)])
    assert (
        behind.from_store(behind.span(), view=committed(open_=[9]), chunk=chunk).held.hidden_messages
        == page.held.hidden_messages
    )


def test_an_expired_undecided_message_holds_no_reader():
    topic = Topic([inline(0, 9, ttl_s=1), stored(1, 10, 2, ttl_s=1), stored(2, 11, 2, ttls_s=[1, 1]), plain(3)])
    view = committed(open_=[9, 10, 11])
    assert topic.from_store(topic.span(now_ms=START_MS + 1_000), view=view).end == "held"
    late = topic.span(now_ms=START_MS + 1_003)
    assert payloads(topic.from_store(late, view=view)) == [b"plain"]
    lost = Topic([stored(0, 9, 2, segments=[0, 0], winners=[1]), plain(1)])
    assert payloads(lost.from_store(lost.span(), view=view)) == [b"plain"], "nothing of it will ever come"


def test_a_full_page_that_ends_at_an_undecided_message_is_held_rather_than_more():
    topic = Topic([plain(0), inline(1, -5), inline(2, 9), plain(3)])
    page = topic.from_store(topic.span(), 1, view=committed(open_=[9]))
    assert (page.count, page.end, page.held.hidden_messages) == (1, "held", 2)


def test_skipped_rows_are_not_examined_again():
    topic = Topic([plain(0), *(inline(1 + ms, 7) for ms in range(50))])
    page = topic.from_store(topic.span(), view=committed(invalid=[7]))
    assert (page.count, page.end) == (1, "end")
    assert page.last_id > topic.messages[-1].message_id
    everything = Topic([inline(0, -7), inline(1, -7)])
    page = everything.from_store(everything.span(), view=SEEN)
    assert (page.count, page.end) == (0, "end")
    assert page.last_id > everything.messages[-1].message_id


def test_a_transaction_reads_its_own_uncommitted_messages():
    topic = Topic([plain(0), inline(1, 9), stored(2, 10, 2), plain(3)])
    page = topic.from_store(topic.span(), view=committed(9, 10, read=5))
    assert payloads(page) == [b"plain", b"inline", b"s0", b"s1", b"plain"]


def test_a_read_without_a_view_gets_everything():
    """Open and rolled back messages are included, in their positions."""
    topic = Topic([plain(0), inline(1, 9), inline(2, -8), stored(3, -7, 2), stored(4, 6, 2)])
    page = topic.from_store(topic.span(), pointers=True)
    assert payloads(page) == [b"plain", b"inline", b"inline", b"s0", b"s1", b"s0", b"s1"]
    assert page.pointers == {1: 9, 2: -8, 3: -7, 4: -7, 5: 6, 6: 6}
    assert page.end == "end"


# --- rows that cannot be read ---------------------------------------------------------------------

DAMAGED = {
    "nothing": b"",
    "a pointer that ends early": b"\x01\x00\x00\x00",
    "a pointer and no payload, not even an empty one": b"\x01" + bytes(8),
    "attributes that are none": encode_row(MessageRow(b"m", extras={"a": 7})),
    "attributes that are no strings": encode_row(MessageRow(b"m", pointer=7, extras={"a": {"key": 7}})),
    "extras that end early": encode_row(MessageRow(b"m", extras={"a": {"key": "text"}}))[:12],
    "extras and no payload": encode_row(MessageRow(b"m", pointer=7, extras={"i": 3}))[:-2],
    "extras that are garbled": b"\x04\x00\x00\x00\x04\x81\xa1a\xc1\x02m",
    "a reference that says nothing": encode_row(MessageRow(None, pointer=7)),
    "a reference without a pointer": encode_row(
        MessageRow(None, extras={"n": 1, "b": 1, "f": bytes(10), "l": bytes(10)})
    ),
    "a reference to nowhere": encode_row(
        MessageRow(None, pointer=7, extras={"n": 1, "b": 1, "f": b"", "l": bytes(10)})
    ),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("view", [None, SEEN], ids=["uncommitted", "committed"])
@pytest.mark.parametrize("chunk", [1, 2, 10])
def test_messages_before_a_damaged_row_are_returned_and_reading_can_continue_after_it(damage, view, chunk):
    topic = Topic([plain(0), inline(1, 7), inline(2, 7), inline(3, 7), plain(4)])
    topic.tables[Table.MESSAGE].put([PREFIX + pack_position(START_MS + 2, 0)], [damage])
    first = topic.from_store(topic.span(), view=view, chunk=chunk)
    assert (payloads(first), first.end) == ([b"plain", b"inline"], "more")
    with pytest.raises(DamagedRow):
        topic.from_store(topic.span(after(first.last_id)), view=view, chunk=chunk)
    behind = topic.span(after(pack_position(START_MS + 2, 0) + NO_PAYLOAD_PART))
    assert payloads(topic.from_store(behind, view=view, chunk=chunk)) == [b"inline", b"plain"]


def test_attributes_of_messages_before_a_damaged_row_are_returned():
    entries = [
        Entry(START_MS + ms, 0, b"m", pointer, attributes={"n": str(ms)}) for ms, pointer in enumerate([None, 7, 7])
    ]
    topic = Topic([*entries, plain(3)])
    topic.tables[Table.MESSAGE].put([PREFIX + pack_position(START_MS + 2, 0)], [DAMAGED["extras that are garbled"]])
    page = topic.from_store(topic.span(), view=SEEN, chunk=10)
    assert (page.count, page.end, page.attributes) == (2, "more", {0: {"n": "0"}, 1: {"n": "1"}})


@pytest.mark.parametrize("damage", [b"", b"\x00", b"\xff", b"\x04\x00", encode_row(MessageRow(None))], ids=repr)
def test_a_damaged_payload_row_ends_the_page_before_it(damage):
    topic = Topic([plain(0), stored(1, 7, 5), plain(2)])
    prefix = PREFIX + (7).to_bytes(8, "big")
    hurt = topic.messages[3].message_id
    topic.tables[Table.PAYLOAD].put([prefix + hurt[10:]], [damage])
    first = topic.from_store(topic.span(), view=SEEN)
    assert payloads(first) == [b"plain", b"s0", b"s1"]
    with pytest.raises(DamagedRow):
        topic.from_store(topic.span(after(first.last_id)), view=SEEN)
    assert payloads(topic.from_store(topic.span(after(hurt)), view=SEEN)) == [b"s3", b"s4", b"plain"]


@pytest.mark.parametrize(
    ("damage", "winners"),
    [
        (b"", None),
        (b"", [0]),
        (b"\x00", None),  # with a list of winners it would be excluded, without a segment
        (b"\xff", None),
        (b"\x04\x00", None),
        (b"\x04\x00", [0]),
        (b"\x04\x00\x00\x00\x01\xc1\x00", [0]),
        (b"\x04\xff\xff\xff\xff\x80", [0]),
    ],
)
def test_damaged_payload_rows_alone_in_their_list_are_not_taken_for_messages(damage, winners):
    topic = Topic([stored(1, 7, 2, segments=[0, 0], winners=winners), plain(2)])
    prefix = PREFIX + (7).to_bytes(8, "big")
    for each in topic.messages[:2]:
        topic.tables[Table.PAYLOAD].put([prefix + each.message_id[10:]], [damage])
    with pytest.raises(DamagedRow):
        topic.from_store(topic.span(), view=SEEN)


def test_a_damaged_row_after_the_holding_message_has_no_effect():
    topic = Topic([plain(0), inline(1, 9), plain(2), plain(3)])
    topic.tables[Table.MESSAGE].put([PREFIX + pack_position(START_MS + 2, 0)], [b"\xff"])
    page = topic.from_store(topic.span(), view=committed(open_=[9]))
    assert (page.count, page.end, page.held.write_pointer) == (1, "held", 9)


def test_pages_are_correct_for_every_start_and_limit_of_a_topic_with_everything():
    topic = Topic(
        [
            plain(0, ttl_s=1),
            stored(1, 7, 3, orphans=1),
            inline(2, -3),
            stored(2, -8, 2, sequence=1),
            inline(3, 4, ttl_s=60),
            stored(5, 9, 6, segments=[0, 1, 0, 1, 1, 0], winners=[0], ttl_s=60),
            plain(6),
            stored(7, 10, 2),
            inline(8, 5),
        ]
    )
    for view in (
        None,
        SEEN,
        committed(open_=[10]),
        committed(invalid=[7]),
        committed(open_=[4]),
        committed(10, read=9),
    ):
        for limit in (1, 2, 3, 5, 100):
            for start in ids_around(topic):
                span = topic.span(start, now_ms=START_MS + 1_002)
                check_page(topic, topic.from_store(span, limit, view=view), span, limit, 10**9, view)
