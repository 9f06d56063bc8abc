"""Hypothesis strategies for every record of the HTTP interface, and pages made of messages."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from plainsong.protocol.page import Page, item
from plainsong.protocol.requests import PollRequest, PublishRequest, PublishResponse, Receipt

int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
times = st.integers(0, (1 << 63) - 1)
payloads = st.binary(max_size=300) | st.text(max_size=40).map(str.encode)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
maps = st.dictionaries(texts, texts, max_size=3)
ids = st.integers(0, (1 << 159) - 1).map(lambda number: number.to_bytes(20, "big"))


def or_none(strategy):
    return st.none() | strategy


publishes_1 = st.builds(PublishRequest, st.lists(payloads, max_size=20), or_none(int64))
publishes = st.builds(
    PublishRequest,
    st.lists(payloads, max_size=20),
    or_none(int64),
    or_none(int32),
    or_none(texts),
    or_none(int64),
    or_none(int32),
    or_none(st.lists(int64, max_size=5)),
    st.booleans(),
    or_none(texts),
    or_none(texts),
    or_none(st.lists(texts, max_size=5)),
    or_none(st.lists(or_none(int32), max_size=5)),
    or_none(st.lists(maps, max_size=3)),
)
polls_1 = st.builds(PollRequest, or_none(ids | times), st.booleans(), or_none(int32), or_none(st.binary(max_size=90)))
polls = st.builds(
    PollRequest,
    or_none(ids | times),
    st.booleans(),
    or_none(int32),
    or_none(st.binary(max_size=90)),
    or_none(ids),
    or_none(int32),
    or_none(int32),
    or_none(st.sampled_from(["uncommitted", "committed"])),
)
responses_1 = st.builds(PublishResponse, or_none(int64), int64, int32, int64, int32)
responses = st.builds(PublishResponse, or_none(int64), int64, int32, int64, int32, st.booleans())
receipts = st.builds(
    Receipt,
    or_none(ids),
    or_none(ids),
    int32,
    st.booleans(),
    st.booleans(),
    or_none(int64),
    or_none(st.lists(int64, max_size=5)),
    or_none(st.lists(int64, max_size=5)),
)
messages = st.lists(st.tuples(ids, payloads), max_size=20)


@st.composite
def pages(draw):
    """Draw a page split into parts anywhere, some of its messages with attributes and pointers."""
    given_messages = draw(messages)
    indexes = range(len(given_messages))
    cuts = sorted(draw(st.sets(st.integers(0, len(given_messages)), max_size=3)) | {0, len(given_messages)})
    page = page_of(given_messages)
    items = list(page.parts)
    page.parts = [b"".join(items[low:high]) for low, high in pairwise(cuts)]
    page.attributes = {index: draw(maps) for index in indexes if draw(st.booleans())}
    page.pointers = {index: draw(int64) for index in indexes if draw(st.booleans())}
    return page


def page_of(given_messages) -> Page:
    """Return a page with one part per message."""
    return Page([item(*message) for message in given_messages], len(given_messages))
