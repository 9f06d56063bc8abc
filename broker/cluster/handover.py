"""Hands topics over in steps, so that none is silent for longer than it has to be.

Has topics come and go in portions: raises or lowers in how many slices this instance takes part, until it is as wanted.

came, undrained      0 ─► 1 ─► … ─► 64      others give what is ours now, and have us open it, before the next step
leaves, drained     64 ─► … ─► 0            the next owners have opened what was ours, before the next step

While nobody else is there to take or to give it is done in one step. So is what is left when the time for a shutdown
is over (``joining.py``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import trio

from broker.link.flow import LinkBroken, Reply
from plainsong.protocol.cluster import SLICES, lowered_slices, raised_slices
from plainsong.protocol.errors import BadRequest, PlainsongError
from plainsong.protocol.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

    from actors.directory import Directory
    from actors.ownership import Instance
    from broker.cluster.membership import Membership
    from broker.cluster.owners import Owners
    from broker.link.server import Call, CallHandler

log = logging.getLogger(__name__)
#: How long a step may take until the next one is made all the same.
STEP_S = 6.0
#: Until a step is tried again of which nobody could be told.
RETRY_S = 0.5


class HandoverSteps(Protocol):
    """The topics that come and go, and the other instances' share in that; its waits are bounded."""

    def open(self) -> Collection[TopicName]:
        """The topics that are open here."""
        ...

    async def given(self) -> None:
        """Wait until the next owners have what was ours."""
        ...

    async def taken(self, slices: int) -> None:
        """Wait until the others have let go what is ours now, and we have opened it."""
        ...


class Rebalance:
    """Makes the steps; ``run`` it from before the cluster is entered."""

    def __init__(self, membership: Membership, hands: HandoverSteps) -> None:
        self.membership = membership
        self._hands = hands
        self._changed = trio.Event()
        #: Where the present way up began: the figure, and how many topics were open.
        self._begun: tuple[int, int] | None = None
        self._stepping = False
        membership.on_change(self._look_again)

    def __repr__(self) -> str:
        return f"<Portions {self.membership.slices} of {self.membership.wanted}>"

    def _look_again(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def run(self) -> None:
        """Make steps whenever there are some to make, until cancelled. Never raises."""
        while True:
            changed = self._changed
            if self.settled:
                self._begun = None
                await changed.wait()
                continue
            self._stepping = True
            well = await self._step()
            self._stepping = False
            self._look_again()
            if not well:
                with trio.move_on_after(RETRY_S):
                    await self._changed.wait()

    @property
    def settled(self) -> bool:
        """Whether there is no step to make."""
        return self.membership.slices == self.membership.wanted

    async def gone(self) -> None:
        """Wait until everything is given away."""
        while self.membership.slices or self._stepping or not self.settled:
            await self._changed.wait()

    async def _step(self) -> bool:
        """One of them, and what it takes until the next; False: ZooKeeper could not be told."""
        membership = self.membership
        before = membership.slices
        up = before < membership.wanted
        after = self._up(before) if up else self._down(before)
        # Of what cannot be told anyway, nothing is let go and taken back either.
        if not (membership.connected and await membership.take(after)):
            return False
        with trio.move_on_after(STEP_S):
            await (self._hands.taken(after) if up else self._hands.given())
        return True

    def _up(self, slices: int) -> int:
        others = [each for each in self.membership.assignment.members if each.name != self.membership.me.name]
        if not any(each.slices for each in others):
            return SLICES
        topics = len(self._hands.open())
        if self._begun is None:
            self._begun = slices, topics
        begun_at, had = self._begun
        return raised_slices(slices, begun_at=begun_at, came=max(0, topics - had))

    def _down(self, slices: int) -> int:
        self._begun = None
        others = [each for each in self.membership.assignment.members if each.name != self.membership.me.name]
        return 0 if all(each.leaving for each in others) else lowered_slices(slices, self._hands.open())


# --- handing ---------------------------------------------------------------------------------------
#
# What instances say to each other while topics change hands, so that none is silent for longer than it has to be.
#
# topics.open [[namespace, topic], …] answered once they are open, as they are yours now, or cannot be topics.given
# [instance, slices] answered once all topics of these slices that are its own now are let go
#
# Nothing rests on it: whoever is not told opens a topic at its first request.


#: Topics of one call; more are told of in further ones, one after the other.
MAX_NAMES = 200
#: How long the next owners may take for the topics of a call.
OPEN_S = 5.0
#: How much later than others an instance may see a change.
VIEW_S = 2.0
#: Topics that are opened at a time for whoever let them go.
OPENED_AT_ONCE = 64


class Handover:
    """Implements ``portions.Hands``, and ``Directory.open_at_owners``: this instance's side of it, and its answers."""

    def __init__(self, directory: Directory, owners: Owners) -> None:
        self._directory = directory
        self._owners = owners
        self._opening = trio.CapacityLimiter(OPENED_AT_ONCE)
        #: Names and figures that others have told us of and that we do not see yet.
        self.waiting = 0

    def kinds(self) -> dict[str, CallHandler]:
        """What answers what."""
        return {"topics.open": self._open, "topics.given": self._given}

    # --- what we say ---------------------------------------------------------------------------

    async def pass_on(self, names: Sequence[TopicName]) -> None:
        """Have the next owners open topics that we have let go; returns when they have, or after a while."""
        by_owner: dict[Instance, list[TopicName]] = {}
        for name in names:
            owner = self._owners.elsewhere(name)
            if owner is not None:
                by_owner.setdefault(owner, []).append(name)
        async with trio.open_nursery() as nursery:
            for owner, some in by_owner.items():
                nursery.start_soon(self._pass_on, owner, some)

    async def _pass_on(self, owner: Instance, names: list[TopicName]) -> None:
        for at in range(0, len(names), MAX_NAMES):
            if not await self._say(owner, "topics.open", [[*name] for name in names[at : at + MAX_NAMES]]):
                return

    async def _say(self, to: Instance, kind: str, value: Any) -> bool:
        until_s = trio.current_time() + OPEN_S
        try:
            with trio.fail_at(until_s):
                link = await self._owners.links.to(to.address)
                await link.call(kind, value, deadline_s=until_s)
        except (LinkBroken, PlainsongError, trio.TooSlowError) as error:
            why = str(error) or "it did not answer in time"
            log.debug("another instance did not hear of a hand-over", extra={"instance": to.name, "why": why})
            return False
        return True

    def open(self) -> Collection[TopicName]:
        """The topics that are open here."""
        return [entry.name for entry in self._directory]

    async def given(self) -> None:
        """Wait until the next owners have what was ours."""
        await self._directory.handed_over()

    async def taken(self, slices: int) -> None:
        """Wait until the others have let go what is ours now, and we have opened it."""
        ownership = self._owners.ownership
        async with trio.open_nursery() as nursery:
            for instance in ownership.instances:
                if instance.name != ownership.me.name:
                    nursery.start_soon(self._say, instance, "topics.given", [ownership.me.name, slices])

    # --- what we answer ------------------------------------------------------------------------

    async def _open(self, call: Call) -> Reply:
        names = [TopicName(str(namespace), str(topic)) for namespace, topic in call.value]
        if len(names) > MAX_NAMES:
            raise BadRequest(f"{len(names)} topics at once are too many")
        seen_until_s = trio.current_time() + VIEW_S
        with trio.move_on_after(OPEN_S):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(self._open_one, name, seen_until_s)
        return Reply()

    async def _open_one(self, name: TopicName, seen_until_s: float) -> None:
        if not await self._seen(lambda: self._owners.ownership.is_mine(name), seen_until_s):
            return
        async with self._opening:
            try:
                await self._directory.entry(name).first_load_ended.wait()
            except PlainsongError as error:  # its first request will say it
                log.debug("a topic was not opened", extra={"topic": str(name), "why": error.detail})

    async def _given(self, call: Call) -> Reply:
        instance, slices = str(call.value[0]), int(call.value[1])
        ownership = self._owners.ownership
        await self._seen(lambda: ownership.slices_of(instance) >= slices, trio.current_time() + VIEW_S)
        await self._directory.handed_over()
        return Reply()

    async def _seen(self, holds: Callable[[], bool], until_s: float) -> bool:
        """Whether the view says so, or comes to say so until then."""
        self.waiting += 1
        try:
            with trio.move_on_at(until_s):
                while not holds():
                    await self._owners.changed.wait()
        finally:
            self.waiting -= 1
        return holds()
