"""This instance among the others: its node in ZooKeeper, its view of the members, and the ownership that follows.

    an event ──► our node is kept ──► all nodes are read ──► the view changes ──► its listeners are notified
       ▲                                                                                  │
       └──────────────────────────────────────────────────────────────────────────────────┘

Every event triggers a read of all nodes. While ZooKeeper is unavailable the last view stays in force, and owners
continue. Topics that the store reports as claimed by other instances are not claimed back before the view has been read
again. Safety rests only on the store.

``broker.cluster.handover`` changes the number of slices in which this instance takes part, step by step.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from actors.ownership import Instance
from broker.membership.zookeeper import Disconnected, Nodes, ZooKeeper
from plainsong.protocol.cluster import SLICES, Assignment, Member, NameTaken, Placement, first_slices, wanted_slices
from plainsong.protocol.errors import ClusterUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from actors.observe import Clock
    from broker.config.sections import Ensemble
    from plainsong.protocol.names import TopicName

log = logging.getLogger(__name__)
#: The nodes are read again after this long without an event, in case a watch was lost.
REREAD_S = 30.0
#: The same after a failure, or while another instance uses our name.
RETRY_S = 0.5
#: How many lost topics to remember; the oldest beyond them is claimed again by its next request.
MAX_LOST = 100_000
#: The time for entering and leaving, in addition to the session time-out.
PATIENCE_S = 2.0
#: The time for recording our slices, once the lock is ours. It must suffice for a slow ZooKeeper: a step that is undone
#: would be repeated and undone forever.
SLICES_S = 15.0


class Membership:
    """Implements ``Ownership``. Call ``run``, and ``enter`` once connections are accepted."""

    def __init__(
        self,
        ensemble: Ensemble,
        name: str,
        *,
        weight: int,
        session_timeout_s: float,
        clock: Clock,
        access: Mapping[str, Any] | None = None,
        proof: str | None = None,
    ) -> None:
        """``proof``: see ``Member.proof``."""
        self._zookeeper = ZooKeeper(
            ensemble.hosts, session_timeout_s=session_timeout_s, on_event=self._on_event, access=access
        )
        self._nodes = Nodes(self._zookeeper, ensemble.path)
        self._session_timeout_s = session_timeout_s
        self._clock = clock
        self._me = Member(name, "", weight, proof=proof)
        self._view = ClusterView()
        #: The topics that others have claimed → the number of the loss.
        self._lost: OrderedDict[TopicName, int] = OrderedDict()
        self._losses = 0
        self._event = trio.Event()
        self._read = trio.Event()
        self._reading = trio.Lock()
        self._wanted = False
        self._session = 0
        #: True once this process has had its node.
        self.entered = False
        #: The address of another instance with our name; None if there is none.
        self.taken_by: str | None = None
        #: The address of an instance with another ``cluster.secret_file``, which keeps this one out; None if there is
        #: none.
        self.kept_out_by: str | None = None
        #: Time of the last connection to ZooKeeper, or of its loss; milliseconds since 1970.
        self.since_ms = clock.now_ms()
        self._was_connected = False
        self._logged_why = ""

    def __repr__(self) -> str:
        return f"<Membership of {self._me.name} {self._zookeeper!r} {self._view.assignment!r}>"

    # --- the view, without waiting ----------------------------------------------------------------

    @property
    def me(self) -> Instance:
        """This instance; its address is empty until ``enter``."""
        return Instance(self._me.name, self._me.address)

    @property
    def instances(self) -> Sequence[Instance]:
        return self._view.instances

    @property
    def assignment(self) -> Assignment:
        """The current view: members, including leaving ones, and placement."""
        return self._view.assignment

    @property
    def changes(self) -> int:
        """Number of changes of members, pins and drains seen so far."""
        return self._view.changes

    @property
    def connected(self) -> bool:
        return self._zookeeper.connected

    def owner(self, name: TopicName) -> Instance | None:
        owner = self._view.assignment.owner(name)
        return None if owner is None or name in self._lost else self._view.instance(owner.name)

    def is_mine(self, name: TopicName) -> bool:
        owner = self._view.assignment.owner(name)
        return (
            owner is not None
            and owner.name == self._me.name
            and self.entered
            and self.taken_by is None
            and name not in self._lost
        )

    def slices_of(self, instance: str) -> int:
        return self._view.slices_of(instance)

    @property
    def slices(self) -> int:
        """The number of slices in which this instance takes part."""
        return self._me.slices if self.entered and self.taken_by is None else 0

    @property
    def wanted(self) -> int:
        """The target number of slices, which follows from the placement, and from whether this instance leaves."""
        if not self.entered or self.taken_by is not None or self._me.leaving:
            return 0
        if self._me.name not in self._view:
            return self._me.slices  # until a view contains our node
        return wanted_slices(self._view.assignment.members, self._view.assignment.placement, self._me.name)

    def deposed(self, name: TopicName) -> None:
        """See ``Ownership.deposed``: here the topic has no owner until the view has been read again."""
        self._losses += 1
        self._lost[name] = self._losses
        self._lost.move_to_end(name)
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        self._on_event()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._view.listeners.append(listener)

    # --- life -------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow ZooKeeper until cancelled, which ends our session and removes our node. Never raises."""
        async with self._zookeeper:
            task_status.started()
            while True:
                event = self._event
                pause_s = REREAD_S
                if not await self._reread():
                    pause_s = RETRY_S
                    await self._zookeeper.renew()
                with trio.move_on_after(pause_s):
                    await event.wait()

    async def enter(self, address: str) -> None:
        """Enter the cluster under ``address``, without topics while others own them.

        Returns once the node exists, or after a time-out; the node is then created as soon as ZooKeeper answers.

        Raises:
          NameTaken: another instance has our name, and keeps it.
        """
        self._me = replace(self._me, address=address)
        self._wanted = True
        self._on_event()
        with trio.move_on_after(self._session_timeout_s + PATIENCE_S):
            while not self.entered and self.kept_out_by is None:
                await self._read.wait()
        if self.taken_by is not None:
            raise NameTaken(self._me.name, self.taken_by)
        if not self.entered and self.kept_out_by is None:
            log.warning("the cluster has not been reached yet, nothing is owned", extra={"instance": self._me.name})

    async def begin_to_leave(self) -> None:
        """Announce that this instance leaves; it keeps its topics until ``take_slices`` or ``leave`` changes that."""
        await self._announce(replace(self._me, leaving=True))

    async def leave(self) -> None:
        """Own nothing from now on, and announce it; without ZooKeeper the others notice when our session expires."""
        await self._announce(replace(self._me, leaving=True, slices=0))

    async def take_slices(self, slices: int) -> bool:
        """Take part in this many slices. Return False, and undo the change, if ZooKeeper did not confirm it.

        Topics that we lose by this stop being ours immediately; topics that we gain become ours once it is recorded.
        """
        before = self._me
        mine = self._become(replace(before, slices=slices))
        recorded = False
        async with self._reading:
            with trio.move_on_after(SLICES_S), suppress(Disconnected):
                recorded = await self._keep()
        if recorded:
            await self._reread()  # if this fails or takes long, nothing is undone
            return True
        if self._me is mine:
            self._me = before
            self._view.update_own(self._mine())
        return False

    async def _announce(self, mine: Member) -> None:
        """Write our new state to our node, if ZooKeeper answers soon."""
        self._become(mine)
        with trio.move_on_after(PATIENCE_S):
            await self._reread()

    def _become(self, mine: Member) -> Member:
        """Apply our new state to the local view."""
        self._me = mine
        self._view.update_own(self._mine())
        return mine

    async def change_placement(self, edit: Callable[[Placement], Placement]) -> None:
        """Change pins and drains; effective here on return, elsewhere a moment later.

        Raises:
          ClusterUnavailable: ZooKeeper does not answer; the change is safe to repeat.
        """
        try:
            await self._nodes.change_placement(edit)
        except Disconnected as error:
            raise ClusterUnavailable(str(error), hint="retry; topics are still served") from error
        await self._reread()

    # --- reading the nodes ------------------------------------------------------------------------

    def _on_event(self) -> None:
        if self._zookeeper.connected != self._was_connected:
            self._was_connected = self._zookeeper.connected
            self.since_ms = self._clock.now_ms()
            if self._was_connected:
                log.info("zookeeper is available", extra={"session": f"{self._zookeeper.session:#x}"})
            else:
                log.warning(
                    "zookeeper is unavailable, owners continue", extra={"session": f"{self._zookeeper.session:#x}"}
                )
        self._event.set()
        self._event = trio.Event()

    async def _reread(self) -> bool:
        """Update our node, and read all nodes. Return True if that succeeded."""
        async with self._reading:
            losses = self._losses
            try:
                if self._wanted and not self.entered:
                    others = await self._nodes.members()
                    self._find_strangers(others)
                    self._me = replace(self._me, slices=first_slices(filter(self._fits, others), self._me))
                succeeded = self._wanted is False or (self.kept_out_by is None and await self._keep())
                members, placement = await self._nodes.members(), await self._nodes.placement()
                if self.entered:
                    self._find_strangers(members)
                    if self.kept_out_by is not None:  # both entered at the same time
                        await self._nodes.remove(self._me.name)
                        self.entered = succeeded = False
                        self._view.notify()
            except Disconnected as error:
                self._not_read(error)
                succeeded = False
            else:
                self._logged_why = ""
                while self._lost and next(iter(self._lost.values())) <= losses:
                    self._lost.popitem(last=False)  # the topic was lost before this read, which shows its owner
                self._view.update([each for each in members if self._fits(each)], placement, self._mine())
        self._read.set()
        self._read = trio.Event()
        return succeeded

    # --- the cluster's secret ---------------------------------------------------------------------
    #
    # Instances with different secrets refuse each other's links, so neither could forward requests to the other.
    # Instances with the same secret ignore the nodes of others. An instance that finds only strangers stays out until
    # they are gone; of two that enter at the same time, the later one leaves again.

    def _fits(self, other: Member) -> bool:
        """True if links with the other instance are possible, according to its node."""
        return None in (self._me.proof, other.proof) or self._me.proof == other.proof

    def _find_strangers(self, members: Sequence[Member]) -> None:
        """Set ``kept_out_by``."""
        me, others = None, []
        for each in members:
            if each.name == self._me.name:
                me = each
            else:
                others.append(each)
        strangers = [each for each in others if not self._fits(each)]
        if self.entered:
            strangers = [each for each in strangers if me is None or each.since < me.since]
        is_known = any(each.proof is not None and self._fits(each) for each in others)
        before, self.kept_out_by = self.kept_out_by, None
        if strangers and not is_known:
            self.kept_out_by = strangers[0].address
            if before is None:
                log.error(
                    "the instances of the cluster have another cluster.secret_file, nothing is owned",
                    extra={"instance": self._me.name, "address": self.kept_out_by},
                )

    def _not_read(self, error: Disconnected) -> None:
        """Log, once, why a connected ZooKeeper does not answer: its ACLs may deny access to the nodes."""
        if self._zookeeper.connected and str(error) != self._logged_why:
            self._logged_why = str(error)
            log.warning("zookeeper cannot be used, owners continue", extra={"why": self._logged_why})

    async def _keep(self) -> bool:
        """Write our node. Return False while another instance has our name."""
        try:
            await self._nodes.keep(self._me, first=not self.entered)
        except NameTaken as error:
            if self.taken_by is None:
                log.error(
                    "another instance has this name, nothing is owned",
                    extra={"instance": self._me.name, "address": error.address},
                )
                self.taken_by = error.address
                self._view.notify()
            return False
        # Also in a new session: this instance may have missed announcements of the others.
        came = not self.entered or self.taken_by is not None or self._session != self._zookeeper.session
        self.entered, self.taken_by, self._session = True, None, self._zookeeper.session
        if came:
            log.info("joined the cluster", extra={"instance": self._me.name, "address": self._me.address})
            self._view.notify()
        return True

    def _mine(self) -> Member | None:
        """Return our own member; None while another instance has the node of our name."""
        return self._me if self.taken_by is None else None


# --- view ------------------------------------------------------------------------------------------


class ClusterView:
    """The members and the placement as last read, and the ownership that follows."""

    def __init__(self) -> None:
        self._members: Sequence[Member] = ()
        self._by_name: dict[str, Instance] = {}
        self.assignment = Assignment((), Placement())
        self.listeners: list[Callable[[], None]] = []
        #: Number of changes so far, without the steps of hand-overs.
        self.changes = 0

    def __contains__(self, instance: str) -> bool:
        return instance in self._by_name

    @property
    def instances(self) -> Sequence[Instance]:
        return [self._by_name[each.name] for each in self.assignment.members if each.slices or not each.leaving]

    def instance(self, name: str) -> Instance:
        """Return the instance of this name. Raises KeyError."""
        return self._by_name[name]

    def slices_of(self, instance: str) -> int:
        return next((each.slices for each in self.assignment.members if each.name == instance), 0)

    def update(self, members: Sequence[Member], placement: Placement, me: Member | None) -> None:
        """Apply the state that was read, except for ``me``: we release slices before other instances know that we do.

        Notifies the listeners if anything has changed.
        """
        self._members = members
        mine = (each if me is None or each.name != me.name else _own_member(each, me) for each in members)
        before = self.assignment
        seen = self.assignment = Assignment(mine, placement, before=before)
        if seen == before:
            return
        self._by_name = {each.name: Instance(each.name, each.address) for each in seen.members}
        if not _differs_by_a_step(before, seen):
            self.changes += 1
            _log(seen)
        self.notify()

    def update_own(self, me: Member | None) -> None:
        """Apply a change of ``me``."""
        self.update(self._members, self.assignment.placement, me)

    def notify(self) -> None:
        """Call every listener: something has changed, or may have."""
        for listener in self.listeners:
            listener()


def _own_member(node: Member, me: Member) -> Member:
    return replace(node, leaving=me.leaving, slices=min(node.slices, me.slices))


def _differs_by_a_step(before: Assignment, after: Assignment) -> bool:
    """True if only the numbers of slices differ."""
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
