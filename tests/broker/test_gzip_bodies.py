"""Compressed bodies: bodies refused before inflation, the limit on inflation, and the requests that it delays."""

from __future__ import annotations

import gzip
import io
import json
import threading
import time
import zlib
from random import Random

import pytest
import trio
from broker_in_process import TOPICS, in_process

from broker.http import budgets
from broker.http.budgets import MAX_RATIO, BodyBudget, decoded_body
from plainsong.protocol.errors import BodyTooLarge, MalformedBody
from tests.broker.listeners import Reader, post, running
from tests.patience import PATIENCE_S

MIB = 1 << 20
JSON = "Content-Type: application/json"
GZIP = "Content-Encoding: gzip"
EMPTY = gzip.compress(b"", mtime=0)
#: 50 MiB of zeros in 50 KiB, more than a body may inflate to.
BOMB = gzip.compress(bytes(50 * MIB))
BOTH_WAYS = pytest.mark.parametrize("listener", ["hot", "application"])


async def inflated(body: bytes, max_bytes: int = 64 * MIB, timeout_s: float = 30.0) -> bytes:
    budget = BodyBudget(128 * MIB)
    with budget.reserve() as held:
        found = await decoded_body(body, {"content-encoding": "gzip"}, max_bytes, held, timeout_s)
        assert held.reserved_bytes == len(found)
    return found


def members(*contents: bytes) -> bytes:
    return b"".join(map(gzip.compress, contents))


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000, 3 * MIB])
async def test_a_body_of_any_size_and_of_several_members_inflates_to_the_original_bytes(size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    assert await inflated(gzip.compress(content)) == content
    assert await inflated(members(content, b"", b"x", content)) == content + b"x" + content
    stored = io.BytesIO()
    with gzip.GzipFile(fileobj=stored, mode="wb", compresslevel=0) as file:
        file.write(content)
    assert await inflated(stored.getvalue()) == content


async def test_malformed_truncated_and_trailing_gzip_data_is_refused() -> None:
    whole = gzip.compress(b"hello" * 1000)
    for wrong in (whole[:-1], whole[:11], whole[:3], b"hello", whole + b"x", whole + whole[:-1], zlib.compress(b"x")):
        with pytest.raises(MalformedBody):
            await inflated(wrong)
        with pytest.raises(MalformedBody):
            await inflated(members(bytes(range(256)) * 8000) + wrong)
    assert await inflated(b"") == b""


async def test_a_body_inflates_to_a_thousand_times_its_size_at_most() -> None:
    with pytest.raises(BodyTooLarge, match="1000 times"):
        await inflated(gzip.compress(bytes(20 * MIB)))
    nearly = gzip.compress(bytes(range(256)) + bytes(MIB))
    assert len(nearly) * MAX_RATIO > MIB
    assert len(await inflated(nearly)) == MIB + 256
    with pytest.raises(BodyTooLarge, match=f"{MIB} bytes"):
        await inflated(gzip.compress(bytes(range(256)) * 8000), max_bytes=MIB)


async def test_four_megabytes_of_empty_members_are_refused_and_a_few_are_accepted() -> None:
    with pytest.raises(MalformedBody, match="members"):
        await inflated(EMPTY * (4 * MIB // len(EMPTY)))
    assert await inflated(EMPTY * 1000 + gzip.compress(b"x")) == b"x"


async def test_many_small_members_take_time_linear_in_their_number() -> None:
    member = gzip.compress(bytes(range(64)))
    few = await processor_s(member * 2_000)
    many = await processor_s(member * 40_000)
    assert many < 20 * 8 * few  # with quadratic time it would take 400 times as long


async def processor_s(body: bytes) -> float:
    begun_s = time.process_time()
    await inflated(body)
    return time.process_time() - begun_s


async def test_other_requests_run_while_a_body_inflates_and_the_work_ends_with_its_request() -> None:
    body = gzip.compress(bytes(range(256)) * (256 << 10))
    threads: set[str] = set()
    turns = 0
    real = budgets._Gunzip.step

    def seen(self: budgets._Gunzip, most_bytes: int) -> None:
        threads.add(threading.current_thread().name)
        real(self, most_bytes)

    async with trio.open_nursery() as nursery:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(budgets._Gunzip, "step", seen)
            done = trio.Event()

            async def count() -> None:
                nonlocal turns
                while not done.is_set():
                    turns += 1
                    await trio.lowlevel.checkpoint()

            nursery.start_soon(count)
            await inflated(body)
            done.set()
    assert turns > 64
    assert threading.current_thread().name not in threads
    with trio.move_on_after(0) as cancelled:
        await inflated(body)
    assert cancelled.cancelled_caught


async def test_a_body_that_takes_too_long_to_inflate_is_refused() -> None:
    with pytest.raises(MalformedBody, match="within 0 s"):
        await inflated(gzip.compress(bytes(range(256)) * 20_000), timeout_s=0.0)


async def test_a_client_that_leaves_while_its_body_inflates_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stepping, go_on = threading.Event(), threading.Event()
    real = budgets._Gunzip.step

    def slow(self: budgets._Gunzip, most_bytes: int) -> None:
        stepping.set()
        go_on.wait(PATIENCE_S)
        real(self, most_bytes)

    monkeypatch.setattr(budgets._Gunzip, "step", slow)
    async with running() as listener:
        async with await listener.connect() as stream:
            await stream.send_all(post("t/store", gzip.compress(Random(7).randbytes(256_000)), GZIP, JSON))
            await trio.to_thread.run_sync(stepping.wait, PATIENCE_S)
        go_on.set()
        with trio.fail_after(PATIENCE_S):
            while listener.budget.reserved_bytes:
                await trio.lowlevel.checkpoint()


@BOTH_WAYS
@pytest.mark.parametrize(
    ("path", "content_type", "status", "code"),
    [
        ("a.b/publish", "text/plain", 400, "invalid_name"),
        ("missing/publish", "text/plain", 415, "unsupported_media_type"),
        ("missing/publish", "application/json", 404, "topic_not_found"),
        ("missing/store", "avro/binary", 404, "topic_not_found"),
        ("missing/rollback", "avro/binary", 404, "topic_not_found"),
        ("missing/poll", "application/json", 404, "topic_not_found"),
        ("missing/offsets", "application/json", 404, "topic_not_found"),
        ("t/publish", "application/json", 413, "body_too_large"),
    ],
)
async def test_a_bomb_is_refused_by_name_content_type_and_topic_before_it_is_inflated(
    listener: str, path: str, content_type: str, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    real = budgets._Gunzip.step

    def counted(self: budgets._Gunzip, most_bytes: int) -> None:
        steps.append(most_bytes)
        real(self, most_bytes)

    monkeypatch.setattr(budgets._Gunzip, "step", counted)
    async with in_process(listener=listener) as daemon:
        await daemon.create()
        headers = {"Content-Type": content_type, "Content-Encoding": "gzip"}
        refused = await daemon.http.request("POST", f"{TOPICS}/{path}", content=BOMB, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert bool(steps) == (status == 413)


@BOTH_WAYS
async def test_a_compressed_publish_is_accepted_and_its_connection_kept_after_a_refusal(listener: str) -> None:
    async with in_process(listener=listener) as daemon:
        await daemon.create()
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        for topic, status in (("missing", 404), ("t", 200), ("missing", 404), ("t", 200)):
            body = gzip.compress(json.dumps({"messages": ["x" * 10_000]}).encode())
            answer = await daemon.http.request("POST", f"{TOPICS}/{topic}/publish", content=body, headers=headers)
            assert answer.status_code == status
        assert len(await daemon.poll()) == 2


async def test_a_refused_body_leaves_nothing_that_could_be_parsed_as_a_request() -> None:
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(post("t/store", BOMB, GZIP, "Content-Type: text/plain") + post("t/publish"))
        assert (await reader.reply()).code == "unsupported_media_type"
        assert (await reader.reply()).status == 200
