"""This instance among the others: its node in ZooKeeper, its view of the members, and from that who owns what.

This instance among the others: its node in ZooKeeper, its view of who is there, and from that who owns what.

    noticed ──► our node is kept ──► all nodes are read ──► the view is another one ──► whoever asked for that is told
       ▲                                                                                              │
       └──────────────────────────────────────────────────────────────────────────────────────────────┘

Whatever is noticed, all of it is read again. While ZooKeeper is away the last view stays in force, and owners go on; of
what others have claimed by then, as the store says, nothing is claimed back before the view has been read again.
Safety rests on the store alone.

In how many slices this instance takes part is changed by ``portions.py``, step by step.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from actors.ownership import Instance
from broker.cluster.zookeeper import Disconnected, Nodes, ZooKeeper
from plainsong.protocol.cluster import SLICES, Assignment, Member, NameTaken, Placement, first_slices, wanted_slices
from plainsong.protocol.errors import ClusterUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actors.observe import Clock
    from broker.config.sections import Ensemble
    from plainsong.protocol.names import TopicName

log = logging.getLogger(__name__)
#: How long nothing may be noticed before all is read again: a watch that was lost costs this much.
REREAD_S = 30.0
#: The same after a failure, or while another instance has our name.
RETRY_S = 0.5
#: Topics that the store gave to others and that are remembered; beyond them the oldest is claimed again if asked for.
MAX_LOST = 100_000
#: What entering and leaving may take beyond the time of a session.
PATIENCE_S = 2.0


class Membership:
    """Implements ``Ownership``; ``run`` it, and ``enter`` once connections are accepted."""

    def __init__(self, ensemble: Ensemble, name: str, *, weight: int, session_timeout_s: float, clock: Clock) -> None:
        self._zookeeper = ZooKeeper(ensemble.hosts, session_timeout_s=session_timeout_s, on_notice=self._notice)
        self._nodes = Nodes(self._zookeeper, ensemble.path)
        self._session_timeout_s = session_timeout_s
        self._clock = clock
        self._me = Member(name, "", weight)
        self._view = ClusterView()
        #: By what was the how manieth loss.
        self._lost: OrderedDict[TopicName, int] = OrderedDict()
        self._losses = 0
        self._noticed = trio.Event()
        self._read = trio.Event()
        self._reading = trio.Lock()
        self._wanted = False
        self._session = 0
        #: Whether our node has been there in the life of this process.
        self.entered = False
        #: Where another instance of our name is; None: there is none.
        self.taken_by: str | None = None
        #: Since when ZooKeeper is what it is, connected or not; milliseconds since 1970.
        self.since_ms = clock.now_ms()
        self._was_connected = False
        self._said_why = ""

    def __repr__(self) -> str:
        return f"<Membership of {self._me.name} {self._zookeeper!r} {self._view.assignment!r}>"

    # --- what is asked, at once -------------------------------------------------------------------

    @property
    def me(self) -> Instance:
        """This instance; without an address until it has entered."""
        return Instance(self._me.name, self._me.address)

    @property
    def instances(self) -> Sequence[Instance]:
        """See ``Ownership.instances``."""
        return self._view.instances

    @property
    def assignment(self) -> Assignment:
        """The view: members, those that are leaving too, and placement."""
        return self._view.assignment

    @property
    def changes(self) -> int:
        """How often members, pins or drains were seen to change."""
        return self._view.changes

    @property
    def connected(self) -> bool:
        """Whether ZooKeeper is."""
        return self._zookeeper.connected

    def owner(self, name: TopicName) -> Instance | None:
        """See ``Ownership.owner``."""
        owner = self._view.assignment.owner(name)
        return None if owner is None or name in self._lost else self._view.instance(owner.name)

    def is_mine(self, name: TopicName) -> bool:
        """See ``Ownership.is_mine``."""
        owner = self._view.assignment.owner(name)
        return (
            owner is not None
            and owner.name == self._me.name
            and self.entered
            and self.taken_by is None
            and name not in self._lost
        )

    def slices_of(self, instance: str) -> int:
        """See ``Ownership.slices_of``."""
        return self._view.slices_of(instance)

    @property
    def slices(self) -> int:
        """In how many slices this instance takes part, of those that it may."""
        return self._me.slices if self.entered and self.taken_by is None else 0

    @property
    def wanted(self) -> int:
        """In how many it is to in the end, as operators and its own leaving have it."""
        if not self.entered or self.taken_by is not None or self._me.leaving:
            return 0
        if self._me.name not in self._view:
            return self._me.slices  # until the view is read that has our node in it
        return wanted_slices(self._view.assignment.members, self._view.assignment.placement, self._me.name)

    def deposed(self, name: TopicName) -> None:
        """See ``Ownership.deposed``: it is nobody's until the view has been read again."""
        self._losses += 1
        self._lost[name] = self._losses
        self._lost.move_to_end(name)
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        self._notice()

    def on_change(self, told: Callable[[], None]) -> None:
        """See ``Ownership.on_change``."""
        self._view.told.append(told)

    # --- life -------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow ZooKeeper until cancelled; then our node goes. Never raises."""
        async with self._zookeeper:
            task_status.started()
            while True:
                noticed = self._noticed
                pause_s = REREAD_S
                if not await self._look():
                    pause_s = RETRY_S
                    await self._zookeeper.renew()
                with trio.move_on_after(pause_s):
                    await noticed.wait()

    async def enter(self, address: str) -> None:
        """Be one of the instances from now on, reached at ``address``; one without topics while others have them.

        Returns when it is so, or after a while, when it will be as soon as ZooKeeper is there.

        Raises:
          NameTaken: another instance has our name, and keeps it.
        """
        self._me = replace(self._me, address=address)
        self._wanted = True
        self._notice()
        with trio.move_on_after(self._session_timeout_s + PATIENCE_S):
            while not self.entered:
                await self._read.wait()
        if self.taken_by is not None:
            raise NameTaken(self._me.name, self.taken_by)
        if not self.entered:
            log.warning("the cluster is not reached yet, nothing is owned", extra={"instance": self._me.name})

    async def begin_to_leave(self) -> None:
        """Tell everybody that this instance is going; it owns what it owns until ``take`` or ``leave`` says otherwise."""
        await self._say(replace(self._me, leaving=True))

    async def leave(self) -> None:
        """Own nothing from now on, and tell the others; without ZooKeeper they learn it when our session ends."""
        await self._say(replace(self._me, leaving=True, slices=0))

    async def take(self, slices: int) -> bool:
        """Take part in so many slices. False: that could not be told, and it is as it was.

        Topics of which there are fewer then are not ours from this moment on; what comes is, when it has been told.
        """
        before = self._me
        mine = replace(before, slices=slices)
        if await self._say(mine):
            return True
        if self._me is mine:
            self._me = before
            self._view.see_again(self._mine())
        return False

    async def _say(self, mine: Member) -> bool:
        """What our node is to say from now on; whether it does."""
        self._me = mine
        self._view.see_again(self._mine())
        with trio.move_on_after(PATIENCE_S):
            return await self._look()
        return False

    async def change_placement(self, edit: Callable[[Placement], Placement]) -> None:
        """Have operators' words changed; in force here when this returns, elsewhere a moment later.

        Raises:
          ClusterUnavailable: ZooKeeper does not answer; asked again the same it is the same.
        """
        try:
            await self._nodes.change_placement(edit)
        except Disconnected as error:
            raise ClusterUnavailable(str(error), hint="ask again; topics are served meanwhile") from error
        await self._look()

    # --- reading it all ---------------------------------------------------------------------------

    def _notice(self) -> None:
        if self._zookeeper.connected != self._was_connected:
            self._was_connected = self._zookeeper.connected
            self.since_ms = self._clock.now_ms()
            if self._was_connected:
                log.info("zookeeper is there", extra={"session": f"{self._zookeeper.session:#x}"})
            else:
                log.warning("zookeeper is away, owners go on", extra={"session": f"{self._zookeeper.session:#x}"})
        self._noticed.set()
        self._noticed = trio.Event()

    async def _look(self) -> bool:
        """Read everything; whether that went well."""
        async with self._reading:
            losses = self._losses
            try:
                if self._wanted and not self.entered:
                    others = await self._nodes.members()
                    self._me = replace(self._me, slices=first_slices(others, self._me))
                well = self._wanted is False or await self._keep()
                members, placement = await self._nodes.members(), await self._nodes.placement()
            except Disconnected as error:
                self._not_read(error)
                well = False
            else:
                self._said_why = ""
                while self._lost and next(iter(self._lost.values())) <= losses:
                    self._lost.popitem(last=False)  # lost before this look, which says who has it
                self._view.see(members, placement, self._mine())
        self._read.set()
        self._read = trio.Event()
        return well

    def _not_read(self, error: Disconnected) -> None:
        """Tell, once, of a ZooKeeper that is connected and gives no answer, as where nobody may read or write there."""
        if self._zookeeper.connected and str(error) != self._said_why:
            self._said_why = str(error)
            log.warning("zookeeper cannot be used, owners go on", extra={"why": self._said_why})

    async def _keep(self) -> bool:
        """Our node; False while another instance has our name."""
        try:
            await self._nodes.keep(self._me, first=not self.entered)
        except NameTaken as error:
            if self.taken_by is None:
                log.error(
                    "another instance has this name, nothing is owned",
                    extra={"instance": self._me.name, "address": error.address},
                )
                self.taken_by = error.address
                self._view.tell()
            return False
        # In another session, too: whatever the others told meanwhile, this instance has not heard.
        came = not self.entered or self.taken_by is not None or self._session != self._zookeeper.session
        self.entered, self.taken_by, self._session = True, None, self._zookeeper.session
        if came:
            log.info("joined the cluster", extra={"instance": self._me.name, "address": self._me.address})
            self._view.tell()
        return True

    def _mine(self) -> Member | None:
        """What we say of ourselves; None while the node of our name is another's."""
        return self._me if self.taken_by is None else None


# --- view ------------------------------------------------------------------------------------------
#
# What one instance knows of all of them: the members and the placement as they were read, and from that who owns
# what.


class ClusterView:
    """The latest one."""

    def __init__(self) -> None:
        self._members: Sequence[Member] = ()
        self._by_name: dict[str, Instance] = {}
        self.assignment = Assignment((), Placement())
        self.told: list[Callable[[], None]] = []
        #: How often it has changed, steps of a hand-over not counted.
        self.changes = 0

    def __contains__(self, instance: str) -> bool:
        return instance in self._by_name

    @property
    def instances(self) -> Sequence[Instance]:
        """See ``Ownership.instances``."""
        return [self._by_name[each.name] for each in self.assignment.members if each.slices or not each.leaving]

    def instance(self, name: str) -> Instance:
        """One that is there. Raises KeyError."""
        return self._by_name[name]

    def slices_of(self, instance: str) -> int:
        """See ``Ownership.slices_of``."""
        return next((each.slices for each in self.assignment.members if each.name == instance), 0)

    def see(self, members: Sequence[Member], placement: Placement, me: Member | None) -> None:
        """Members as their nodes say, but for ``me``: what we give away is given before anybody has read it.

        Whoever asked for that is told when anything is another than before.
        """
        self._members = members
        mine = (each if me is None or each.name != me.name else _as_said(each, me) for each in members)
        before = self.assignment
        seen = self.assignment = Assignment(mine, placement, before=before)
        if seen == before:
            return
        self._by_name = {each.name: Instance(each.name, each.address) for each in seen.members}
        if not _differs_by_a_step(before, seen):
            self.changes += 1
            _log(seen)
        self.tell()

    def see_again(self, me: Member | None) -> None:
        """The same members, since ``me`` is another."""
        self.see(self._members, self.assignment.placement, me)

    def tell(self) -> None:
        """That something is another, or may be."""
        for told in self.told:
            told()


def _as_said(node: Member, me: Member) -> Member:
    return replace(node, leaving=me.leaving, slices=min(node.slices, me.slices))


def _differs_by_a_step(before: Assignment, after: Assignment) -> bool:
    """Whether nothing is another but in how many slices somebody takes part."""
    return before.placement == after.placement and (
        [replace(each, slices=SLICES) for each in before.members]
        == [replace(each, slices=SLICES) for each in after.members]
    )


def _log(seen: Assignment) -> None:
    names = ", ".join(each.name + (" (leaving)" if each.leaving else "") for each in seen.members)
    placement = seen.placement
    log.info(
        "the cluster changed",
        extra={"instances": names, "pins": len(placement.pins), "drained": ", ".join(sorted(placement.drained))},
    )
