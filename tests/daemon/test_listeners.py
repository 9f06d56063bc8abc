"""A daemon gives the same answers alone and with front ends, from the same messages."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plainsong.protocol.frames import FRAMES_TYPE
from plainsong.protocol.ids import LAST_BOUND, after
from plainsong.protocol.requests import PollRequest, PublishRequest
from tests.broker.differential import difference, exchanged, meaning
from tests.codecs import AVRO, AVRO_2, JSON
from tests.daemon.harness import Daemon
from tests.daemon.talk import Answer, ask, create, publish, publish_call, read_all
from tests.patience import PATIENCE_S

CODECS = {"application/json": JSON, "avro/binary": AVRO, "avro/binary; version=2": AVRO_2}


@pytest.fixture(scope="module", params=["http.processes=2"], ids=["front-ends"])
def listeners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Daemon, Daemon, list[bytes]]]:
    """Two daemons on copies of one store, one alone and one with front ends, and the ids of its messages."""
    home: Path = tmp_path_factory.mktemp("listeners")
    with Daemon(home / "alone") as one:
        create(one.address, "t")
        create(one.address, "empty")
        create(one.address, "scratch")
        create(one.address, "gone")
        publish(one.address, "t", b"text", b"", "ünï".encode(), b"\xff\x00 bytes")
        publish(one.address, "t", *[b"%d" % number for number in range(300)])
        publish(one.address, "t", bytes(200_000))
        ids = [message_id for message_id, _ in read_all(one.address, "t")]
        one.stop()
        shutil.copytree(home / "alone", home / "server")
        with Daemon(home / "server", request.param) as other:
            one.start()
            yield one, other, ids


def polls(ids: list[bytes]) -> st.SearchStrategy[PollRequest]:
    starts = st.one_of(
        st.none(),
        st.sampled_from(ids),
        st.sampled_from([*ids, *[int.from_bytes(message_id[:8], "big") for message_id in ids]]),
        st.sampled_from([after(ids[0]), LAST_BOUND, b"short", -1, 0, 1 << 62]),
    )
    limits = st.sampled_from([None, None, None, 1, 7, 100, 304, 2**31 - 1, 0])
    return st.builds(PollRequest, starts, st.booleans(), limits, st.sampled_from([*[None] * 9, b"\x00"]))


PUBLISHES = st.builds(
    PublishRequest,
    st.lists(st.binary(max_size=30), max_size=4),
    st.sampled_from([*[None] * 9, 7]),
)
TOPICS = st.sampled_from([*["t"] * 8, "empty", "missing", "no.name"])
HEADERS = st.lists(
    st.sampled_from(
        ["Accept-Encoding: gzip", f"Accept: {FRAMES_TYPE}", f"Accept: {FRAMES_TYPE}; version=2; fields=pointer",
         "Accept: text/html", "Prefer: return=minimal", "X-Request-Id: mine"]
    ),
    max_size=2, unique=True,
)  # fmt: skip
QUERIES = st.sampled_from(
    # No short TTL, with which a message could have expired at one and not yet at the other.
    [*[""] * 8, "?wait_ms=1", "?max_bytes=100", "?payload=base64", "?ttl=86400", "?isolation=committed", "?x=1"]
)


@st.composite
def hot_requests(draw: st.DrawFn, ids: list[bytes]) -> bytes:
    """Draw a request for a hot route, valid or nearly so."""
    content_type = draw(st.sampled_from([*[*CODECS] * 3, "text/plain"]))
    codec = CODECS.get(content_type, JSON)
    if draw(st.sampled_from([True, True, False])):
        path = f"{draw(TOPICS)}/poll"
        body = codec.encode_poll(draw(polls(ids)))
    else:
        path = f"{draw(st.sampled_from(['scratch', 'scratch', 'scratch', 'missing']))}/{draw(st.sampled_from(['publish', 'publish', 'publish', 'store', 'rollback']))}"
        body = codec.encode_publish(draw(PUBLISHES))
    body = body[: draw(st.sampled_from([*[None] * 10, -1, 3]))]
    lines = [
        f"POST /v1/namespaces/ring/topics/{path}{draw(QUERIES)} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {content_type}",
        *draw(HEADERS),
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_every_hot_request_gets_the_same_answer(listeners):
    one, other, ids = listeners
    verbs: set[bytes] = set()
    statuses: Counter[int] = Counter()

    @settings(
        # Fewer would not get every status.
        max_examples=max(100, settings.default.max_examples),
        database=None,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(st.lists(hot_requests(ids), min_size=1, max_size=3))
    def fuzz(asked: list[bytes]) -> None:
        async def both() -> None:
            with trio.fail_after(PATIENCE_S):
                replies = [await exchanged(listener.address, asked, len(asked)) for listener in (one, other)]
            assert [meaning(reply) for reply in replies[0]] == [meaning(reply) for reply in replies[1]]
            statuses.update(reply.status for reply in replies[0])

        trio.run(both)
        verbs.update(request.split(b" ")[1].rpartition(b"/")[2].partition(b"?")[0] for request in asked)

    fuzz()
    print(f"statuses: {dict(statuses)}")
    assert {200, 400, 404, 415} <= statuses.keys()
    assert verbs == {b"publish", b"store", b"rollback", b"poll"}


@pytest.mark.parametrize("content_type", CODECS)
def test_both_listeners_accepted_the_same_publishes(listeners, content_type):
    """After the fuzzing and one more publish to each, both have the same messages, with different ids."""
    one, other, _ = listeners
    codec = CODECS[content_type]
    body = codec.encode_publish(PublishRequest([b"from both", b""]))
    lines = [
        "POST /v1/namespaces/ring/topics/scratch/publish HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
    ]
    request = "\r\n".join([*lines, "", ""]).encode() + body
    assert trio.run(difference, one.address, other.address, [request], 1) is None
    scratches = [[payload for _, payload in read_all(listener.address, "scratch")] for listener in (one, other)]
    assert scratches[0] == scratches[1]
    assert scratches[0][-2:] == [b"from both", b""]


def test_receipts_of_both_listeners_differ_in_ids_only(listeners):
    one, other, _ = listeners
    for headers in ({"Content-Type": name} for name in CODECS):
        answers = [publish_answer(listener, headers) for listener in (one, other)]
        shapes = [(a.status, a.headers["content-type"], len(a.body), a.receipt().generation) for a in answers]
        assert shapes[0] == shapes[1]


def publish_answer(listener: Daemon, headers: dict[str, str]) -> Answer:
    return ask(listener.address, *publish_call("scratch", [b"x"], headers))
