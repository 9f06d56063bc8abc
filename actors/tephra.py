"""A foreign Tephra as the authority on transactions: its client, and its last known state.

The daemon polls its state periodically; topics and readers use the last one.

    in progress there                     in_progress
    on its invalid list                   invalid
    neither, up to its read pointer       committed or aborted (its state does not distinguish them): visible
    anything above                        unknown

An old state only misses later decisions: a decided transaction stays decided. So publishing continues while Tephra does
not answer; readers of committed messages are refused once the state is older than ``STALE_AFTER`` refreshes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from actors.pointers import ClusterPointerLocations
from plainsong.protocol.errors import PlainsongError, TransactionsUnavailable
from plainsong.protocol.tephra.rpc import ApplicationError, TephraError, decode_reply, encode_call
from plainsong.protocol.tephra.state import decode_visibility_state, inactive_bound, prune_upper_bound, reader_of
from plainsong.protocol.tephra.thrift import MalformedThrift, ThriftFrames, ThriftFrameTooLarge, framed
from plainsong.protocol.transactions.asks import CompletePass, PruningFigures
from plainsong.protocol.transactions.view import Moment, View
from storage.base import StoreError
from storage.threaded import in_thread

if TYPE_CHECKING:
    from actors.observe import Clock
    from actors.pointers import PointerIndex, PointerLocations
    from plainsong.protocol.transactions.transaction import Standing, Transaction
    from storage.base import Store

log = logging.getLogger(__name__)
#: Refreshes after which a state is too old for readers of committed messages.
STALE_AFTER = 6
#: Maximum number of seconds between two attempts, unless refreshes are further apart.
MAX_BACK_OFF_S = 30.0
#: How late a write of another instance may arrive, including the difference between clocks.
LATE_MS = 600_000
#: Larger states are decoded in a worker thread, so as not to block the event loop.
_INLINE_BYTES = 64 << 10


class _Known(NamedTuple):
    asked_s: float
    """When the state was requested, on trio's clock; the state is no older."""
    reader: Transaction
    view: View
    in_progress: frozenset[int]
    invalids: frozenset[int]
    checkpointed: dict[int, tuple[int, ...]]
    """All pointers of each open transaction with several, by each of these pointers."""


class ForeignTephra:
    """Implements ``Authority`` from the state of a Tephra service, where clients begin and decide transactions."""

    def __init__(
        self,
        host: str,
        port: int,
        clock: Clock,
        pointers: PointerIndex,
        store: Store,
        *,
        refresh_s: float,
        max_lifetime_ms: int,
        call_timeout_s: float = 10.0,
    ) -> None:
        """``store``: if it is shared, other instances have topics that are missing from ``pointers``."""
        self._client = TephraClient(host, port, timeout_s=call_timeout_s)
        self._clock = clock
        self._pointers = pointers
        self._refresh_s = refresh_s
        self._max_lifetime_ms = max_lifetime_ms
        self._known: _Known | None = None
        self._begun_s: float | None = None
        self._why = "no answer yet"
        self._loaded = trio.Event()
        self._last_pass: CompletePass | None = None
        self._store = store
        self._cluster_locations = ClusterPointerLocations() if store.traits.shared else None

    @property
    def address(self) -> str:
        """The Tephra service's ``host:port``."""
        return self._client.address

    async def run(self) -> None:
        """Poll the state until cancelled, less often while there is no answer. Never raises."""
        failures = 0
        self._begun_s = trio.current_time()
        try:
            while True:
                due_s = trio.current_time() + self._refresh_s
                try:
                    await self.refresh()
                except PlainsongError as error:
                    self._why = error.detail
                    if not failures:
                        log.warning("the Tephra does not answer", extra={"address": self.address, "why": error.detail})
                    failures += 1
                    due_s = trio.current_time() + self._back_off_s(failures)
                else:
                    if failures:
                        log.info("the Tephra answers again", extra={"address": self.address})
                    failures = 0
                await trio.sleep_until(due_s)
        finally:
            await self._client.aclose()

    async def refresh(self) -> None:
        """Fetch the state now. Raises TransactionsUnavailable, MalformedTransaction: the last state stays."""
        asked_s = trio.current_time()
        data: bytes = await self._client.call("getSnapshot")
        if len(data) < _INLINE_BYTES:
            known = _decode_state(data, asked_s)
        else:
            known = await in_thread(_decode_state, data, asked_s)
        before, self._known = self._known, known
        self._loaded.set()
        self._notify_topics(before, known)

    async def loaded(self) -> None:
        """Wait for the first state."""
        await self._loaded.wait()

    # --- without waiting ---------------------------------------------------------------------------

    @property
    def age_s(self) -> float | None:
        """Seconds since the last state was requested; None if there is none yet."""
        return None if self._known is None else trio.current_time() - self._known.asked_s

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last state, or since the first attempt to get one; None before the first attempt."""
        since_s = self._begun_s if self._known is None else self._known.asked_s
        return None if since_s is None else trio.current_time() - since_s

    def standing(self, pointer: int) -> Standing:
        """Return the standing of a pointer according to the last state."""
        return "unknown" if self._known is None else _standing(self._known, pointer)

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return all pointers of an open transaction in the last state; only the pointer itself if it is unknown."""
        return (pointer,) if self._known is None else self._known.checkpointed.get(pointer, (pointer,))

    def view(self) -> View:
        """Return what readers of committed messages may see. Raises TransactionsUnavailable if the state is too old."""
        return self._fresh().view

    def view_now(self) -> View | None:
        """Return ``view``; None if the state is too old."""
        try:
            return self._fresh().view
        except TransactionsUnavailable:
            return None

    async def fresh(self) -> None:
        """Return at once: readers use the last refresh, as documented."""
        await trio.lowlevel.checkpoint()

    async def as_of(self, at_ms: int) -> Moment:
        """Raise TransactionsUnavailable: Tephra does not record when it decided."""
        del at_ms
        await trio.lowlevel.checkpoint()
        raise TransactionsUnavailable(
            "transactions are decided by Tephra, which does not record when",
            hint="reading as of a moment needs the daemon's own transaction service",
        )

    def invalids(self) -> tuple[int, ...]:
        """Return its invalid pointers, ascending. Raises TransactionsUnavailable if the state is too old."""
        return self._fresh().reader.invalids

    def prune_bound(self) -> int:
        """Return how far its invalid list may be pruned once every topic has rolled back the pointers on it.

        With several instances, one with an older state may still accept a write under a pointer that has become
        invalid, until the pointer is older than any transaction can be.

        Raises:
          TransactionsUnavailable: the state is too old.
        """
        bound = prune_upper_bound(self._fresh().reader)
        if self._cluster_locations is None:
            return bound
        if not self._max_lifetime_ms:
            return 0
        return max(min(bound, inactive_bound(self._clock.now_ms() - LATE_MS, self._max_lifetime_ms)), 0)

    def begin_pass(self) -> CompletePass:
        """Return list and bound of the janitor's next pass. Raises TransactionsUnavailable if the state is too old."""
        return CompletePass(self._clock.now_ms(), self.invalids(), self.prune_bound())

    async def pointer_locations(self) -> PointerLocations:
        """Return where pointers have rows, according to the topics: Tephra does not store that.

        Raises:
          TransactionsUnavailable: the store cannot be read for the topics of other instances.
        """
        if self._cluster_locations is None:
            await trio.lowlevel.checkpoint()
            return self._pointers
        try:
            await self._cluster_locations.find(self._store)
        except StoreError as error:
            raise TransactionsUnavailable(error.detail, hint="the next pass will try again") from error
        return self._cluster_locations

    async def complete(self, passed: CompletePass) -> int:
        """Record a complete pass for ``pruning``; return 0, as nothing is pruned here."""
        self._last_pass = passed
        return 0

    def pruning(self) -> PruningFigures:
        """Return figures for pruning Tephra's list. Raises TransactionsUnavailable if the state is too old."""
        invalids = self.invalids()
        last = self._last_pass
        where: PointerLocations = self._pointers if self._cluster_locations is None else self._cluster_locations
        return PruningFigures(
            invalid=len(invalids),
            oldest_invalid=invalids[0] if invalids else None,
            oldest_by_topic=where.oldest_by_topic(),
            safe_bound=(last.bound or None) if last else None,
            last_pass_ms=last.begun_ms if last else None,
            max_lifetime_ms=self._max_lifetime_ms,
            kept_because=f"the invalid list belongs to the Tephra at {self.address}; prune it there",
        )

    # --- inside -----------------------------------------------------------------------------------

    def _back_off_s(self, failures: int) -> float:
        most = max(self._refresh_s, MAX_BACK_OFF_S)
        return min(self._refresh_s * (1 << min(failures - 1, 20)), most)

    def _fresh(self) -> _Known:
        known, age_s = self._known, self.age_s
        if known is None or age_s is None or age_s > STALE_AFTER * self._refresh_s:
            since = "never" if age_s is None else f"{age_s:.0f} s ago"
            raise TransactionsUnavailable(
                f"the state of the Tephra at {self.address} was last received {since}: {self._why}",
                hint="check that Tephra; publishing, and polls with a transaction, still work",
            )
        return known

    def _notify_topics(self, before: _Known | None, known: _Known) -> None:
        """Notify topics and held readers of the pointers that were decided, or became invalid."""
        decided = []
        for pointer in self._pointers.undecided():
            standing = _standing(known, pointer)
            if standing == "committed":
                if not self._pointers.busy((pointer,)):  # otherwise the next refresh notifies them
                    decided.append(pointer)
            elif standing == "invalid" and (before is None or pointer not in before.invalids):
                self._pointers.wake(pointer)
        self._pointers.decided(decided)


def _decode_state(data: bytes, asked_s: float) -> _Known:
    state = decode_visibility_state(data)
    reader = reader_of(state)
    in_progress, invalids = frozenset(reader.in_progress), frozenset(reader.invalids)
    several = [(first, *entry.checkpoints) for first, entry in state.in_progress.items() if entry.checkpoints]
    checkpointed = {each: pointers for pointers in several for each in pointers}
    return _Known(asked_s, reader, View.of(reader), in_progress, invalids, checkpointed)


def _standing(known: _Known, pointer: int) -> Standing:
    if pointer in known.invalids:
        return "invalid"
    if pointer in known.in_progress:
        return "in_progress"
    return "committed" if pointer <= known.reader.read_pointer else "unknown"


# --- client: one connection, one call at a time, each with a deadline ------------------------------


#: Enough for about seven million invalid pointers.
MAX_REPLY_BYTES = 64 << 20
_RECEIVE_BYTES = 256 << 10


class TephraClient:
    """A Thrift client of a Tephra service; connects at the first call, and again after any error."""

    def __init__(self, host: str, port: int, *, timeout_s: float, max_reply_bytes: int = MAX_REPLY_BYTES) -> None:
        self.address = f"{host}:{port}"
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._max_reply_bytes = max_reply_bytes
        self._stream: trio.SocketStream | None = None
        self._frames = ThriftFrames()
        self._sequence_id = 0

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method.

        Raises:
          TransactionsUnavailable: there was no connection, no answer in time, or no answer that can be parsed.
        """
        try:
            with trio.fail_after(self._timeout_s):
                return await self._call(method, *args)
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from None
        except trio.TooSlowError:
            raise self._unavailable(f"no answer to {method} within {self._timeout_s:g} s") from None
        except (trio.BrokenResourceError, EOFError):
            raise self._unavailable("it closed the connection") from None
        except (MalformedThrift, ThriftFrameTooLarge) as error:
            raise self._unavailable(f"its answer is not one of Tephra: {error}") from None
        except (TephraError, ApplicationError) as error:
            raise self._unavailable(f"it answered {error.message!r}") from None

    async def aclose(self) -> None:
        """Close the connection; the next call connects again."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await trio.aclose_forcefully(stream)

    async def _call(self, method: str, *args: Any) -> Any:
        whole = False
        try:
            if self._stream is None:
                self._frames = ThriftFrames(self._max_reply_bytes)
                self._stream = await trio.open_tcp_stream(self._host, self._port)
            self._sequence_id = self._sequence_id + 1 & 0x7FFFFFFF
            await self._stream.send_all(framed(encode_call(method, self._sequence_id, *args)))
            while (reply := self._frames.take()) is None:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
                if not data:
                    raise EOFError
                self._frames.feed(data)
            result = decode_reply(reply, method, self._sequence_id)
            whole = True
            return result
        finally:
            # After an incomplete answer the next bytes cannot be attributed to a call.
            if not whole:
                await self.aclose()

    def _unavailable(self, why: str) -> TransactionsUnavailable:
        return TransactionsUnavailable(
            f"the Tephra at {self.address} is unavailable: {why}",
            hint=("check that Tephra, or correct transactions.tephra"),
        )
