"""Which instance owns which topic, as far as this one knows: what the directory and the router ask.

It says where to send a request, and when to let a topic go. Safety does not rest on it: a store that several instances
share refuses the commits of whoever was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protocol.cluster.slices import SLICES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.names import TopicName


@dataclass(frozen=True, slots=True)
class Instance:
    """One daemon of a cluster."""

    name: str
    """``cluster.instance``: unique, and the same after a restart."""
    address: str
    """``cluster.advertise`` as ``host:port``: where clients and other instances reach it."""


class Ownership(Protocol):
    """The latest view of who owns what; asked on the event loop, never waits."""

    @property
    def me(self) -> Instance:
        """This instance."""
        ...

    @property
    def instances(self) -> Sequence[Instance]:
        """All that are there, this one included, those that have left all they had not; sorted by name."""
        ...

    def owner(self, name: TopicName) -> Instance | None:
        """Who owns a topic, whether it exists or not; None: nobody just now."""
        ...

    def is_mine(self, name: TopicName) -> bool:
        """Whether this instance owns it, and may claim it."""
        ...

    def slices_of(self, instance: str) -> int:
        """In how many slices an instance takes part (``protocol/cluster/slices.py``); 0: in none, or it is not there."""
        ...

    def deposed(self, name: TopicName) -> None:
        """The store said that another instance has claimed a topic: where the view is old, it is not ours any more."""
        ...

    def on_change(self, told: Callable[[], None]) -> None:
        """Have ``told`` called, on the event loop, after every change of the view."""
        ...


class Alone:
    """The ownership of a daemon without others: everything is its own, always."""

    def __init__(self, address: str = "") -> None:
        self._me = Instance("alone", address)

    @property
    def me(self) -> Instance:
        """This instance."""
        return self._me

    @property
    def instances(self) -> Sequence[Instance]:
        """This one."""
        return (self._me,)

    def owner(self, name: TopicName) -> Instance | None:
        """This one."""
        del name
        return self._me

    def is_mine(self, name: TopicName) -> bool:
        """Always."""
        del name
        return True

    def slices_of(self, instance: str) -> int:
        """All."""
        del instance
        return SLICES

    def deposed(self, name: TopicName) -> None:
        """Somebody else uses the same store without ZooKeeper: the next request claims the topic again."""

    def on_change(self, told: Callable[[], None]) -> None:
        """Nothing ever changes."""
