"""Hands topics over in steps, so that no topic is without an owner for longer than necessary.

A rebalance raises or lowers the number of slices in which this instance takes part, until it has the intended value:

entered, undrained   0 ─► 1 ─► … ─► 64      before the next step, the others release what is ours now, and we open it
leaving, drained    64 ─► … ─► 0            before the next step, the next owners open what was ours

A rebalance is a single step if there is no other instance to take or give topics, or if the time limit of a shutdown
has passed (``broker.cluster.join``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import trio

from broker.link.flow import LinkBroken, Reply
from broker.link.server import in_task
from plainsong.protocol.cluster import SLICES, lowered_slices, raised_slices
from plainsong.protocol.errors import BadRequest, PlainsongError
from plainsong.protocol.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

    from actors.directory import Directory
    from actors.ownership import Instance
    from broker.cluster.owners import Owners
    from broker.link.server import Call, CallHandler
    from broker.membership.membership import Membership

log = logging.getLogger(__name__)
#: Time limit for a step to complete; then the next one is made regardless.
STEP_S = 6.0
#: The pause before repeating a step that ZooKeeper did not record.
RETRY_S = 0.5


class HandoverSteps(Protocol):
    """The waits of a rebalance between its steps; they are bounded."""

    def open_topics(self) -> Collection[TopicName]:
        """Return the topics that are open here."""
        ...

    async def given_away(self) -> None:
        """Wait until the next owners have opened the topics that were ours."""
        ...

    async def taken_over(self, slices: int) -> None:
        """Wait until the others have released the topics that are ours with ``slices``, and we have opened them."""
        ...


class Rebalance:
    """Makes the steps. Start ``run`` before the cluster is entered."""

    def __init__(self, membership: Membership, handover: HandoverSteps) -> None:
        self.membership = membership
        self._handover = handover
        self._changed = trio.Event()
        #: The start of the current rise: the number of slices, and of open topics.
        self._begun: tuple[int, int] | None = None
        self._stepping = False
        membership.on_change(self._wake)

    def __repr__(self) -> str:
        return f"<Rebalance {self.membership.slices} of {self.membership.wanted}>"

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def run(self) -> None:
        """Make steps whenever there are any to make, until cancelled. Never raises."""
        while True:
            changed = self._changed
            if self.settled:
                self._begun = None
                await changed.wait()
                continue
            self._stepping = True
            recorded = await self._step()
            self._stepping = False
            self._wake()
            if not recorded:
                with trio.move_on_after(RETRY_S):
                    await self._changed.wait()

    @property
    def settled(self) -> bool:
        """True if there is no step to make."""
        return self.membership.slices == self.membership.wanted

    async def all_given_away(self) -> None:
        """Wait until this instance takes part in no slice."""
        while self.membership.slices or self._stepping or not self.settled:
            await self._changed.wait()

    async def _step(self) -> bool:
        """Make one step, and wait for its effects. Return False if ZooKeeper did not record it."""
        membership = self.membership
        before = membership.slices
        up = before < membership.wanted
        after = self._up(before) if up else self._down(before)
        # Without a connection nothing is released, since the step would only be undone.
        if not (membership.connected and await membership.take_slices(after)):
            return False
        with trio.move_on_after(STEP_S):
            await (self._handover.taken_over(after) if up else self._handover.given_away())
        return True

    def _up(self, slices: int) -> int:
        others = [each for each in self.membership.assignment.members if each.name != self.membership.me.name]
        if not any(each.slices for each in others):
            return SLICES
        topics = len(self._handover.open_topics())
        if self._begun is None:
            self._begun = slices, topics
        begun_at, had = self._begun
        return raised_slices(slices, begun_at=begun_at, came=max(0, topics - had))

    def _down(self, slices: int) -> int:
        self._begun = None
        others = [each for each in self.membership.assignment.members if each.name != self.membership.me.name]
        return 0 if all(each.leaving for each in others) else lowered_slices(slices, self._handover.open_topics())


# --- calls between instances -----------------------------------------------------------------------
#
# topics.open     [[namespace, topic], …]   answered once the topics that the receiver owns are open, or cannot be
# topics.given    [instance, slices]        answered once the topics that these slices give to it are released
#
# Correctness does not depend on them: a topic whose next owner was not called is opened by its first request.


#: Topics per call; more are sent in further calls, one after the other.
MAX_NAMES = 200
#: Time limit for the next owner to open the topics of a call.
OPEN_S = 5.0
#: The longest expected delay between two instances' views of a change.
VIEW_S = 2.0
#: Topics of a call that are opened concurrently.
OPENED_AT_ONCE = 64


class Handover:
    """Calls the other instances while topics change owners, and answers their calls.

    Implements ``HandoverSteps`` and ``Directory.open_at_owners``.
    """

    def __init__(self, directory: Directory, owners: Owners) -> None:
        self._directory = directory
        self._owners = owners
        self._opening = trio.CapacityLimiter(OPENED_AT_ONCE)
        #: Number of received calls about changes that this instance does not see yet.
        self.waiting = 0

    def kinds(self) -> dict[str, CallHandler]:
        """Return the handlers of these calls, by kind."""
        return {"topics.open": in_task(self._on_open), "topics.given": in_task(self._on_given)}

    # --- calling -------------------------------------------------------------------------------

    async def pass_on(self, names: Sequence[TopicName]) -> None:
        """Have the next owners open topics that this instance has released. Return when they have, or time out."""
        by_owner: dict[Instance, list[TopicName]] = {}
        for name in names:
            owner = self._owners.remote_owner(name)
            if owner is not None:
                by_owner.setdefault(owner, []).append(name)
        async with trio.open_nursery() as nursery:
            for owner, some in by_owner.items():
                nursery.start_soon(self._pass_on, owner, some)

    async def _pass_on(self, owner: Instance, names: list[TopicName]) -> None:
        for at in range(0, len(names), MAX_NAMES):
            if not await self._call(owner, "topics.open", [[*name] for name in names[at : at + MAX_NAMES]]):
                return

    async def _call(self, to: Instance, kind: str, value: Any) -> bool:
        until_s = trio.current_time() + OPEN_S
        try:
            with trio.fail_at(until_s):
                link = await self._owners.links.to(to.address)
                await link.call(kind, value, deadline_s=until_s)
        except (LinkBroken, PlainsongError, trio.TooSlowError) as error:
            why = str(error) or "it did not answer in time"
            log.debug("another instance was not reached for a handover", extra={"instance": to.name, "why": why})
            return False
        return True

    def open_topics(self) -> Collection[TopicName]:
        return [entry.name for entry in self._directory]

    async def given_away(self) -> None:
        await self._directory.handed_over()

    async def taken_over(self, slices: int) -> None:
        ownership = self._owners.ownership
        async with trio.open_nursery() as nursery:
            for instance in ownership.instances:
                if instance.name != ownership.me.name:
                    nursery.start_soon(self._call, instance, "topics.given", [ownership.me.name, slices])

    # --- answering -----------------------------------------------------------------------------

    async def _on_open(self, call: Call) -> Reply:
        names = [TopicName(str(namespace), str(topic)) for namespace, topic in call.value]
        if len(names) > MAX_NAMES:
            raise BadRequest(f"{len(names)} topics at once; the limit is {MAX_NAMES}")
        seen_until_s = trio.current_time() + VIEW_S
        with trio.move_on_after(OPEN_S):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(self._open, name, seen_until_s)
        return Reply()

    async def _open(self, name: TopicName, seen_until_s: float) -> None:
        if not await self._seen(lambda: self._owners.ownership.is_mine(name), seen_until_s):
            return
        async with self._opening:
            try:
                await self._directory.entry(name).first_load_ended.wait()
            except PlainsongError as error:  # its first request gets this error
                log.debug("a topic was not opened", extra={"topic": str(name), "why": error.detail})

    async def _on_given(self, call: Call) -> Reply:
        instance, slices = str(call.value[0]), int(call.value[1])
        ownership = self._owners.ownership
        await self._seen(lambda: ownership.slices_of(instance) >= slices, trio.current_time() + VIEW_S)
        await self._directory.handed_over()
        return Reply()

    async def _seen(self, holds: Callable[[], bool], until_s: float) -> bool:
        """Wait until the view shows a change. Return False if it does not in time."""
        self.waiting += 1
        try:
            with trio.move_on_at(until_s):
                while not holds():
                    await self._owners.changed.wait()
        finally:
            self.waiting -= 1
        return holds()
