"""A model of the HBase store's protocol, small enough to explore every order of events.

There is one topic, and one client with three consecutive requests, which it repeats to any owner if there is no answer:
either three publishes, or two stores under a write pointer and the publish of both. Owners succeed one another, while
earlier ones continue as if nothing had happened, or die at any step. A put may take arbitrarily long: it may land late, after
its owner's death, or never. Owners' clocks may differ, so that two owners use the same row key. A reader polls any
owner, including replaced ones. The client stays within an owner's deduplication window. Acknowledged requests must be
present, once and in order, and messages that were read must not change. Epochs are allocated in blocks: a claim may get
any unused one.

``Rules`` lists the parts of the protocol; each can be left out, to show why it is needed.
"""

from __future__ import annotations

import gc
from collections import deque
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from tests.storage.ownership_state import MESSAGES, PAYLOADS, Cell, Flight, Head, Owner, Row, Rules, State, order

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage within the block: states have no cycles, and each collection would scan all of them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Model:
    """Every reachable state."""

    def __init__(
        self,
        rules: Rules,
        *,
        stores: bool,
        owners: int,
        requests: int = 3,
        said: bool = False,
        deaths: bool = False,
    ) -> None:
        """Make a model of an empty topic.

        Args:
          said: True if the first owner has seen that metadata exists; otherwise its existence is unknown to it.
          deaths: True if death is an event. It need not be one: a dead owner is one that takes no more steps. Whatever
            a client, a reader or another owner may do after the death, it may also do while the owner is silent.
        """
        self.said = said
        self.deaths = deaths
        self.rules = rules
        self.stores = stores
        self.owners = owners
        self.requests = requests
        # Most events change neither rows nor head, so each log is read once.
        self._log = cache(self._read_log)

    def explore(self, *, deep: bool = False) -> tuple[int, str | None]:
        """Return the number of states, and the violation in the first bad state, if any.

        Args:
          deep: explore depth-first; otherwise breadth-first, which finds the shortest violation.
        """
        with no_collection():
            return self._explore(deep=deep)

    def _explore(self, *, deep: bool) -> tuple[int, str | None]:
        start = State(said=self.said)
        seen = {start}
        queue = deque([start])
        while queue:
            state = queue.pop() if deep else queue.popleft()
            for reached in self.following(state):
                following = self.without_failed(reached)
                if following not in seen:
                    wrong = self.wrong(following)
                    if wrong is not None:
                        return len(seen), wrong
                    seen.add(following)
                    queue.append(following)
        return len(seen), None

    def without_failed(self, state: State) -> State:
        """Drop puts that no owner waits for and that can no longer succeed, since removed content never reappears."""
        ownerless = state.flights.difference(*(owner.waits for owner in state.owners))
        if not ownerless:
            return state
        vain = {
            flight
            for flight in ownerless
            if (flight.table == "head" and self.rules.compared and flight.before != state.head)
            or (flight.table == "cell" and flight.before != state.cells[flight.key])
            or (flight.table == "kind" and state.said)
            or (
                flight.before is None
                and self.rules.put_if_absent
                and any(key == flight.key and table == flight.table for table, key, _ in state.rows)
            )
        }
        return state._replace(flights=state.flights - vain) if vain else state

    # --- invariants ---

    def log(self, state: State, head: Head, until: int = 1 << 30) -> list[tuple[int, int]]:
        """Return positions and numbers of the messages that a reader with this head sees."""
        return self._log(state.rows, head, until)

    def _read_log(self, rows: frozenset[tuple[str, int, Row]], head: Head, until: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for table, key, row in sorted(rows):
            if table != MESSAGES or key > until or (self.rules.filtered and not head.counts(row.stamp)):
                continue
            if row.what[0] >= 0:
                found.append((key, row.what[0]))
                continue
            _, first, last = row.what
            for where, position, payload in sorted(rows):
                visible = not self.rules.payloads_filtered or head.counts(payload.stamp)
                if where == PAYLOADS and first <= position <= last and visible:
                    found.append((key, payload.what[0]))
        return found

    def wrong(self, state: State) -> str | None:
        log = [number for _, number in self.log(state, state.head)]
        told = range(state.told)
        if self.stores:
            told = range(self.requests - 1 if state.told == self.requests else 0)
        if len(set(log)) < len(log):
            return "a message is present twice"
        if log != sorted(log):
            return "messages are out of order"
        if not set(told) <= set(log) or (self.stores and 0 < len(log) < self.requests - 1):
            return "an acknowledged message is lost"
        if tuple(log[: len(state.read)]) != state.read:
            return "a message that was read has changed"
        return None

    # --- events ---

    def following(self, state: State) -> Iterator[State]:
        if state.claims < self.owners:
            for epoch in range(1, self.owners + 1):
                if epoch not in state.given and (epoch > state.head.last[0] or not self.rules.epoch_above):
                    yield self.claim(state, epoch)
        for flight in sorted(state.flights, key=order):
            yield self.land(state, flight)
        for at, owner in enumerate(state.owners):
            if self.deaths:
                yield self.without(state, at)
            if owner.phase == "claimed":
                beyond = owner.said and any(
                    cell is not None and cell.stamp[0] > owner.head.last[0] for cell in state.cells
                )
                if not (beyond and self.rules.later_respected):
                    yield self.changed(state, at, self.load_metadata(state, owner))
            elif owner.phase == "metadata":
                yield self.changed(state, at, self.load_rows(state, owner))
            else:
                yield from self.polled(state, owner)
                if owner.phase == "idle" and state.asked != owner.number and state.told < self.requests:
                    yield self.ask(state, at)

    def claim(self, state: State, epoch: int) -> State:
        again = not self.rules.new_epoch and state.head.last[0]
        head = state.head if again else state.head.claimed(epoch, keep=self.rules.fences_kept)
        owners = (*state.owners, Owner(epoch, head, said=state.said))
        return state._replace(head=head, owners=owners, claims=state.claims + 1, given=state.given | {epoch})

    @staticmethod
    def without(state: State, at: int) -> State:
        """Make the owner die; its puts in flight remain."""
        asked = 0 if state.asked == state.owners[at].number else state.asked
        return state._replace(owners=state.owners[:at] + state.owners[at + 1 :], asked=asked)

    @staticmethod
    def changed(state: State, at: int, owner: Owner) -> State:
        return state._replace(owners=(*state.owners[:at], owner, *state.owners[at + 1 :]))

    def valid(self, cells: tuple[Cell | None, Cell | None], head: Head) -> int | None:
        """Return which of the two cells counts."""
        if not self.rules.two_cells:
            return 0 if cells[0] else None
        counting = [(cell.stamp, at) for at, cell in enumerate(cells) if cell and head.counts(cell.stamp)]
        return max(counting)[1] if counting else None

    def load_metadata(self, state: State, owner: Owner) -> Owner:
        if not owner.said:
            return owner._replace(phase="metadata")
        at = self.valid(state.cells, owner.head)
        cell = None if at is None else state.cells[at]
        known = owner._replace(phase="metadata", cells=state.cells)
        return known if cell is None else known._replace(done=cell.done, first=cell.first, last=cell.last)

    def load_rows(self, state: State, owner: Owner) -> Owner:
        """Load the messages after those that the metadata covers; stored ones are recorded only in the metadata."""
        log = [] if self.stores else [each for each in self.log(state, owner.head) if each[0] > owner.last]
        done = max([owner.done, *(number + 1 for _, number in log)])
        return owner._replace(phase="idle", done=done, last=max([owner.last, *(key for key, _ in log)]))

    def polled(self, state: State, owner: Owner) -> Iterator[State]:
        """Continue from the reader's position up to the last row that the owner has seen."""
        until = owner.last if not self.stores else 1 << 30
        news = [each for each in self.log(state, owner.head, until) if each[0] > state.position]
        if news:
            yield state._replace(position=news[-1][0], read=(*state.read, *(number for _, number in news)))

    def ask(self, state: State, at: int) -> State:
        """Make the client send its next request, for the first time or again."""
        owner, request = state.owners[at], state.told
        if owner.done > request:
            return state._replace(told=request + 1, asked=0)
        puts = frozenset(self.puts(owner, request))
        waits = frozenset(put for put in puts if put.table != "kind" or self.rules.kind_said)
        state = self.changed(state, at, owner._replace(phase="putting", waits=waits))
        return state._replace(flights=state.flights | puts, asked=owner.number)

    def puts(self, owner: Owner, request: int) -> Iterator[Flight]:
        """Yield the puts of a request's commit; the first and third owners' clocks are ahead."""
        epoch = owner.head.last[0]
        stamp = (epoch, owner.head.last[1] + 1)
        position = owner.last + 1 + owner.number % 2
        done = request + 1
        if not self.stores:
            yield Flight(MESSAGES, position, None, Row(stamp, (request,)), owner.number)
            if request != 1:
                return  # every other commit writes a snapshot
            cell = Cell(stamp, done, 0, position)
        elif done < self.requests:
            yield Flight(PAYLOADS, position, None, Row(stamp, (request,)), owner.number)
            cell = Cell(stamp, done, owner.first or position, position)
        else:
            yield Flight(MESSAGES, 1, None, Row(stamp, (-1, owner.first, owner.last)), owner.number)
            cell = Cell(stamp, done, owner.first, owner.last)
        at = 1 if self.rules.two_cells and self.valid(owner.cells, owner.head) == 0 else 0
        yield Flight("cell", at, owner.cells[at], cell, owner.number)
        if not owner.said:
            yield Flight("kind", 0, None, (stamp,), owner.number)

    # --- puts land ---

    def land(self, state: State, flight: Flight) -> State:
        state = state._replace(flights=state.flights - {flight})
        if flight.table == "head":
            return self.land_head(state, flight)
        if flight.table == "kind":
            return self.answered(state._replace(said=True), flight)
        is_cell = flight.table == "cell"
        where = flight.table, flight.key
        replaced = None if is_cell else next((each for each in state.rows if each[:2] == where), None)
        found = state.cells[flight.key] if is_cell else replaced and replaced[2]
        blind = not is_cell and not self.rules.put_if_absent
        if found != flight.before and not blind:
            return self.refused(state, flight, found)
        if is_cell:
            cells = (flight.after, state.cells[1]) if flight.key == 0 else (state.cells[0], flight.after)
            state = state._replace(cells=cells)
        else:
            row: Row = flight.after  # type: ignore[assignment]  # a row if not a cell
            state = state._replace(rows=(state.rows - {replaced}) | {(*where, row)})
        return self.answered(state, flight)

    def refused(self, state: State, flight: Flight, found: Row | Cell | None) -> State:
        """A put found other content: replace it if no reader will ever see it; otherwise there is another owner."""
        for at, owner in enumerate(state.owners):
            if flight in owner.waits:
                replaceable = found is None or self.replaceable(owner, flight, found)
                if not replaceable:
                    return self.without(state, at)
                again = flight._replace(before=found)
                waits = (owner.waits - {flight}) | {again}
                return self.changed(state, at, owner._replace(waits=waits))._replace(flights=state.flights | {again})
        return state

    def replaceable(self, owner: Owner, flight: Flight, found: Row | Cell) -> bool:
        if flight.table == "cell":
            return found.stamp[0] < owner.head.last[0]
        if not self.rules.only_void_replaced:
            return True
        return found.stamp[0] < owner.head.last[0] and not owner.head.counts(found.stamp)

    def answered(self, state: State, flight: Flight) -> State:
        """A put succeeded; after the last one the owner moves the head."""
        for at, owner in enumerate(state.owners):
            if flight in owner.waits:
                waits = owner.waits - {flight}
                if waits:
                    return self.changed(state, at, owner._replace(waits=waits))
                move = self.move(owner)
                state = self.changed(state, at, owner._replace(phase="moving", waits=frozenset({move})))
                state = state._replace(flights=state.flights | {move})
                return state if self.rules.verified else self.tell(state, owner)
        return state

    @staticmethod
    def move(owner: Owner) -> Flight:
        epoch, serial = owner.head.last
        return Flight("head", 0, owner.head, owner.head._replace(last=(epoch, serial + 1)), owner.number)

    def land_head(self, state: State, flight: Flight) -> State:
        moved = state.head == flight.before or not self.rules.compared
        if moved:
            state = state._replace(head=flight.after)
        for at, owner in enumerate(state.owners):
            if flight in owner.waits:
                if not moved:
                    return self.without(state, at)
                return self.tell(self.changed(state, at, self.settled(state, owner, flight)), owner)
        return state

    def settled(self, state: State, owner: Owner, flight: Flight) -> Owner:
        """The commit took place: add its rows to the owner's state."""
        head: Head = flight.after  # type: ignore[assignment]  # the flight is the head's
        mine = [key for _, key, row in state.rows if row.stamp == head.last and (row.what[0] >= 0)]
        last = max([owner.last, *mine])
        first = owner.first or (min(mine) if self.stores and mine else 0)
        return owner._replace(
            head=head,
            phase="idle",
            waits=frozenset(),
            cells=state.cells,
            done=owner.done + 1,
            first=first,
            last=last,
            said=owner.said or (self.rules.kind_said and state.said),
        )

    @staticmethod
    def tell(state: State, owner: Owner) -> State:
        """Answer the client, if it still waits for this owner."""
        if state.asked != owner.number:
            return state
        return state._replace(told=max(state.told, owner.done + 1), asked=0)
