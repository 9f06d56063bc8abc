"""A chained topic passes verification after any history, including power cuts after any row."""

from __future__ import annotations

from chained_topic import ChainedTopic
from hypothesis import given, settings
from hypothesis import strategies as st

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import (
    Create,
    Publish,
    PublishStaged,
    PublishUnder,
    Remove,
    RollBackPointer,
    SetProperties,
    StoreStaged,
    StoreUnder,
    Undelete,
)
from plainsong.protocol.topic.state import TopicLimits

pointers = st.sampled_from([3, 4, 5])
segments = st.sampled_from("st")
attributes = st.dictionaries(st.sampled_from("ab"), st.text(max_size=2), max_size=2)


@st.composite
def requests(draw, pointer=None):
    messages = draw(st.lists(st.binary(max_size=3), min_size=1, max_size=4))
    each = st.lists(attributes, min_size=len(messages), max_size=len(messages))
    own = st.lists(st.none() | st.sampled_from([1, 5, 7200]), min_size=len(messages), max_size=len(messages))
    producer = draw(st.none() | st.none() | st.just("p")) if pointer is None else None
    return PublishRequest(
        messages,
        write_pointer=pointer,
        ttl_s=draw(st.sampled_from([None, None, 2])),
        message_ttls_s=draw(st.none() | own),
        attributes=draw(st.none() | each),
        atomic=draw(st.booleans()),
        producer=producer,
        sequence_ids=None if producer is None else list(range(at := draw(st.integers(0, 50)), at + len(messages))),
    )


@st.composite
def stores(draw, pointer=None):
    """Draw a store under a write pointer, or of staged messages."""
    messages = draw(st.lists(st.binary(max_size=3), min_size=1, max_size=3))
    own = st.lists(st.none() | st.sampled_from([1, 7200]), min_size=len(messages), max_size=len(messages))
    request = PublishRequest(
        messages,
        write_pointer=pointer,
        producer="p" if pointer is None else None,
        segment=draw(segments) if pointer is None else draw(st.none() | segments),
        message_ttls_s=draw(st.none() | own),
        attributes=[draw(attributes)] * len(messages) if draw(st.booleans()) else None,
    )
    return StoreStaged(request, 1) if pointer is None else StoreUnder(request, 1)


@st.composite
def publishes_of_stored(draw, pointer=None):
    """Draw a publish of stored messages, with or without further messages, or of staged ones."""
    ttl_s = draw(st.sampled_from([None, None, 2]))
    if pointer is None:
        ids = [draw(st.integers(0, 50))]
        some = draw(st.lists(segments, min_size=1, max_size=2, unique=True))
        return PublishStaged(PublishRequest([], producer="p", segments=some, sequence_ids=ids, ttl_s=ttl_s), 1)
    messages = draw(st.lists(st.binary(max_size=3), max_size=2))
    some = draw(st.none() | st.lists(segments, max_size=2, unique=True))
    return PublishUnder(PublishRequest(messages, write_pointer=pointer, segments=some, ttl_s=ttl_s), 1)


asks = st.one_of(
    requests().map(lambda request: Publish(request, 1)),
    requests().map(lambda request: Publish(request, 1)),
    pointers.flatmap(requests).map(lambda request: PublishUnder(request, 1)),
    pointers.flatmap(stores),
    pointers.flatmap(publishes_of_stored),
    stores(),
    publishes_of_stored(),
    pointers.map(RollBackPointer),
    st.sampled_from([1, 3600]).map(lambda ttl_s: SetProperties({"ttl": ttl_s, "chain": "sha256"})),
    st.just(SetProperties({"ttl": 3600})),
    st.sampled_from([Remove(), Undelete()]),
    st.just(Create(ChainedTopic().state.metadata.properties)),
)
steps = st.lists(asks, min_size=1, max_size=3).map(lambda wanted: ("step", wanted))
cuts = st.tuples(st.lists(asks, min_size=1, max_size=3), st.integers(0, 12)).map(lambda both: ("cut", both))
events = st.one_of(
    steps,
    steps,
    steps,
    cuts,
    st.sampled_from([-500, 0, 1, 900, 5_000]).map(lambda ms: ("wait", ms)),
    st.just(("clean", None)),
    st.just(("load", None)),
)


def run(topic, history):
    """Play a history, ignoring refusals."""
    for kind, what in history:
        try:
            if kind == "step":
                topic.do(*what)
            elif kind == "cut":
                topic.do(*what[0], rows=what[1])
            elif kind == "wait":
                topic.now_ms += what
            elif kind == "clean":
                topic.clean()
            else:
                topic.load()
        except PlainsongError:
            pass
        yield


#: An example verifies a history after each step.
EXAMPLES = 100 if settings.get_current_profile_name() == "house" else 1_000


@given(st.lists(events, max_size=14))
@settings(max_examples=EXAMPLES)
def test_a_chained_topic_passes_verification_after_every_step(history):
    topic = ChainedTopic(TopicLimits(max_lifetime_ms=0, checkpoint_rows=4))
    for _ in run(topic, history):
        chained = topic.state.chain is not None and not topic.state.chain.due
        if chained and topic.state.metadata.deleted_ms is None:
            found = topic.verify()
            assert found.is_good, found.faults


@given(st.lists(events, max_size=10), st.data())
@settings(max_examples=EXAMPLES)
def test_a_message_that_disappears_is_found_unless_it_had_expired_or_was_never_covered(history, data):
    topic = ChainedTopic(TopicLimits(max_lifetime_ms=0))
    for _ in run(topic, history):
        pass
    if topic.state.metadata.deleted_ms is not None or topic.state.chain is None or topic.state.chain.due:
        return
    before = topic.verify()
    assert before.is_good
    if not topic.messages():
        return
    key, _ = data.draw(st.sampled_from(topic.messages()))
    del topic.store.tables[Table.MESSAGE][key]
    after = topic.verify()
    assert after.messages == before.messages if after.is_good else after.faults[0].position == key[-10:]
