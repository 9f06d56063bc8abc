"""The contract of every store for rollbacks; each store's test file runs it like ``contract.py``."""

from __future__ import annotations

import pytest
import trio

from plainsong.protocol.effects import Delete, Put, RollBack, put_one
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import MessageRow, decode_row, encode_row
from storage.base import Store, StoreError
from tests.storage.contract import LAST, MESSAGE, METADATA, NAME, everything

POINTER, OTHER_POINTER = 1_480_000_000_000_000_001, 1_480_000_000_000_000_002


def under(pointer: int | None, payload: bytes = b"m", **fields: object) -> bytes:
    """Encode a message row's value."""
    return encode_row(MessageRow(payload, pointer, **fields))


def run_of(pointer: int | None, start: int, count: int, prefix: bytes = b"k", payload: bytes = b"m") -> Put:
    """Return ``count`` rows under one pointer."""
    keys = [number.to_bytes(4, "big") for number in range(start, start + count)]
    return Put(MESSAGE, prefix, keys, [under(pointer, payload)] * count)


def all_of(pointer: int = POINTER, start: bytes = b"k", stop: bytes = b"l") -> RollBack:
    """Return a rollback of all rows whose keys start with k."""
    return RollBack(start, stop, pointer)


async def signs(store: Store) -> list[int | None]:
    """Decode all message rows completely, and return their pointers."""
    return [decode_row(value).pointer for _, value in await everything(store)]


class RollingContract:
    """Subclasses define the fixture ``store``, and ``break_next_write`` as in ``StoreContract``."""

    def break_next_write(self, store: Store) -> None:
        """Make the next write fail with an unknown outcome."""
        raise NotImplementedError

    async def test_a_rollback_flips_exactly_the_rows_of_its_own_pointer(self, store: Store) -> None:
        claim = await store.claim(NAME)
        before = {
            b"a": under(POINTER),
            b"b": under(OTHER_POINTER),
            b"c": under(None),
            b"d": under(POINTER, ttl_s=7, extras={"s": 3}),
            b"e": encode_row(MessageRow(None, POINTER, extras={"n": 2})),
            b"f": under(None, POINTER.to_bytes(8, "big")),
            b"g": under(-OTHER_POINTER),
            b"h": b"",
            b"i": b"\x01\x02",
        }
        await store.write([Put(MESSAGE, b"k", list(before), list(before.values()))], claim=claim)
        await store.write([all_of()], claim=claim)
        after = before | {
            b"a": under(-POINTER),
            b"d": under(-POINTER, ttl_s=7, extras={"s": 3}),
            b"e": encode_row(MessageRow(None, -POINTER, extras={"n": 2})),
        }
        assert await everything(store) == [(b"k" + key, value) for key, value in after.items()]

    async def test_a_rollback_includes_its_start_and_excludes_its_stop(self, store: Store) -> None:
        claim = await store.claim(NAME)
        await store.write([Put(MESSAGE, b"", [b"a", b"b", b"c", b"d"], [under(POINTER)] * 4)], claim=claim)
        await store.write([RollBack(b"b", b"d", POINTER)], claim=claim)
        assert await signs(store) == [POINTER, -POINTER, -POINTER, POINTER]
        await store.write([RollBack(b"d", b"d", POINTER), RollBack(b"z", b"a", POINTER)], claim=claim)
        assert await signs(store) == [POINTER, -POINTER, -POINTER, POINTER]

    async def test_a_repeated_rollback_changes_nothing(self, store: Store) -> None:
        claim = await store.claim(NAME)
        await store.write([run_of(POINTER, 0, 5), run_of(OTHER_POINTER, 5, 5)], claim=claim)
        for _ in range(3):
            await store.write([all_of()], claim=claim)
            assert await signs(store) == [-POINTER] * 5 + [OTHER_POINTER] * 5
        await store.write([all_of(OTHER_POINTER), all_of(OTHER_POINTER)], claim=claim)
        assert await signs(store) == [-POINTER] * 5 + [-OTHER_POINTER] * 5

    async def test_a_rollback_sees_the_rows_its_own_commit_wrote_before_and_not_those_after(self, store: Store) -> None:
        claim = await store.claim(NAME)
        commit = [
            run_of(POINTER, 0, 3),
            put_one(METADATA, b"before", b"v"),
            all_of(),
            run_of(POINTER, 3, 2),
            put_one(METADATA, b"after", b"v"),
        ]
        await store.write(commit, claim=claim)
        assert await signs(store) == [-POINTER] * 3 + [POINTER] * 2
        assert [key for key, _ in await everything(store, METADATA)] == [b"after", b"before"]

    async def test_a_rollback_does_not_restore_a_row_that_its_commit_removed(self, store: Store) -> None:
        claim = await store.claim(NAME)
        await store.write([run_of(POINTER, 0, 3)], claim=claim)
        await store.write([Delete(MESSAGE, [b"k\x00\x00\x00\x01"]), all_of()], claim=claim)
        assert await signs(store) == [-POINTER] * 2

    async def test_rollbacks_of_many_pointers_in_one_commit_all_take_effect(self, store: Store) -> None:
        claim = await store.claim(NAME)
        pointers = [POINTER + number for number in range(40)]
        keys = [number.to_bytes(4, "big") for number in range(400)]
        await store.write([Put(MESSAGE, b"k", keys, [under(pointer) for pointer in pointers * 10])], claim=claim)
        await store.write([all_of(pointer) for pointer in pointers[::2]], claim=claim)
        assert (
            await signs(store)
            == [-pointer if index % 2 == 0 else pointer for index, pointer in enumerate(pointers)] * 10
        )

    async def test_a_rollback_of_a_hundred_thousand_rows_is_whole_and_ends_before_what_follows(
        self, store: Store
    ) -> None:
        claim = await store.claim(NAME)
        for at in range(0, 100_000, 20_000):
            await store.write([run_of(POINTER, at, 20_000)], claim=claim)
        await store.write([run_of(OTHER_POINTER, 100_000, 10)], claim=claim)
        await store.write([put_one(METADATA, b"k", b"1"), all_of(), put_one(METADATA, b"k", b"2")], claim=claim)
        assert await store.get(METADATA, b"k") == b"2"
        assert await signs(store) == [-POINTER] * 100_000 + [OTHER_POINTER] * 10

    async def test_rows_of_many_mib_are_rolled_back_whole(self, store: Store) -> None:
        claim = await store.claim(NAME)
        for at in range(4):
            await store.write([run_of(POINTER, at, 1, payload=bytes([at]) * (3 << 20))], claim=claim)
        await store.write([all_of()], claim=claim)
        rows = [decode_row(value) for _, value in await everything(store)]
        assert [row.pointer for row in rows] == [-POINTER] * 4
        assert [row.payload for row in rows] == [bytes([at]) * (3 << 20) for at in range(4)]

    async def test_other_writes_proceed_during_a_long_rollback_and_nothing_is_lost(self, store: Store) -> None:
        claim = await store.claim(NAME)
        for at in range(0, 30_000, 10_000):
            await store.write([run_of(POINTER, at, 10_000)], claim=claim)

        async def publish(number: int) -> None:
            mine = await store.claim(TopicName("ns", f"t{number}"))
            for i in range(20):
                await store.write([run_of(POINTER, i, 1, b"t%02d" % number)], claim=mine)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: store.write([all_of(), put_one(METADATA, b"done", b"")], claim=claim))
            for number in range(4):
                nursery.start_soon(publish, number)
        assert await signs(store) == [-POINTER] * 30_000 + [POINTER] * 80
        assert await store.get(METADATA, b"done") == b""

    async def test_rows_discarded_during_a_rollback_do_not_reappear(self, store: Store) -> None:
        claim = await store.claim(NAME)
        for at in range(0, 8_000, 4_000):
            await store.write([run_of(POINTER, at, 4_000)], claim=claim)
        keys = [key for key, _ in await everything(store)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: store.write([all_of()], claim=claim))
            nursery.start_soon(store.discard, MESSAGE, keys[::2])
        assert await signs(store) == [-POINTER] * 4_000

    async def test_a_rollback_of_a_range_without_rows_is_not_an_error(self, store: Store) -> None:
        claim = await store.claim(NAME)
        await store.write([all_of(), RollBack(b"", LAST, POINTER)], claim=claim)
        assert await everything(store) == []

    async def test_cancelling_a_rollback_that_has_begun_does_not_interrupt_it(self, store: Store) -> None:
        claim = await store.claim(NAME)
        await store.write([run_of(POINTER, 0, 9000)], claim=claim)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: store.write([all_of()], claim=claim))
            await trio.testing.wait_all_tasks_blocked(0.0)
            nursery.cancel_scope.cancel()
        assert await signs(store) in ([-POINTER] * 9000, [POINTER] * 9000)

    async def test_a_failed_rollback_leaves_every_row_whole_and_a_repeat_finishes_it(self, store: Store) -> None:
        claim = await store.claim(NAME)
        await store.write([run_of(POINTER, 0, 1000)], claim=claim)
        self.break_next_write(store)
        with pytest.raises(StoreError):
            await store.write([all_of()], claim=claim)
        claim = await store.claim(NAME)
        assert {abs(pointer or 0) for pointer in await signs(store)} == {POINTER}
        await store.write([all_of()], claim=claim)
        assert await signs(store) == [-POINTER] * 1000
