"""Has topics come and go in portions: raises or lowers in how many slices this instance takes part, until it is as wanted.

came, undrained      0 ─► 1 ─► … ─► 64      others give what is ours now, and have us open it, before the next step
leaves, drained     64 ─► … ─► 0            the next owners have opened what was ours, before the next step

While nobody else is there to take or to give it is done in one step. So is what is left when the time for a shutdown
is over (``joining.py``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import trio

from protocol.cluster.slices import SLICES, lowered, raised

if TYPE_CHECKING:
    from collections.abc import Collection

    from broker.cluster.membership import Membership
    from protocol.names import TopicName

log = logging.getLogger(__name__)

#: How long a step may take until the next one is made all the same.
STEP_S = 6.0
#: Until a step is tried again of which nobody could be told.
RETRY_S = 0.5


class Hands(Protocol):
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


class Portions:
    """Makes the steps; ``run`` it from before the cluster is entered."""

    def __init__(self, membership: Membership, hands: Hands) -> None:
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
        return raised(slices, begun_at=begun_at, came=max(0, topics - had))

    def _down(self, slices: int) -> int:
        self._begun = None
        others = [each for each in self.membership.assignment.members if each.name != self.membership.me.name]
        return 0 if all(each.leaving for each in others) else lowered(slices, self._hands.open())
