"""What one instance knows of all of them: the members and the placement as they were read, and from that who owns what."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.ownership import Instance
from protocol.cluster.assignment import Assignment
from protocol.cluster.placement import Placement
from protocol.cluster.slices import SLICES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.cluster.assignment import Member

log = logging.getLogger(__name__)


class View:
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
