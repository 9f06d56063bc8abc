"""What actors tell whoever counts: plain calls that cost nothing when nobody does, and must never fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.names import TopicName


class Observer(Protocol):
    """Told by the actors, on the event loop; must return at once and not raise."""

    def committed(self, requests: int, messages: int, write_s: float) -> None:
        """A commit of so many publishes and messages was made durable in ``write_s`` seconds."""

    def told(self, told: Mapping[str, int]) -> None:
        """What became of producers' requests and of producers, counted by the words of ``Step.told``."""

    def fell(self, name: TopicName, error: BaseException) -> None:
        """An actor fell and will be loaded again."""

    def deposed(self, name: TopicName) -> None:
        """The store said that another instance has claimed a topic that was open here."""

    def handed_over(self, topics: int, seconds: float) -> None:
        """So many topics that are other instances' now have been let go, ``seconds`` after that was known."""

    def loaded(self, name: TopicName, load_s: float) -> None:
        """A topic was loaded from disk in ``load_s`` seconds."""

    def cleaned(self, expired: int, purged: int) -> None:
        """The janitor removed rows: expired ones, and ones of gone generations."""


class Unobserved:
    """Nobody counts."""

    def committed(self, requests: int, messages: int, write_s: float) -> None:
        """Nothing."""

    def told(self, told: Mapping[str, int]) -> None:
        """Nothing."""

    def fell(self, name: TopicName, error: BaseException) -> None:
        """Nothing."""

    def deposed(self, name: TopicName) -> None:
        """Nothing."""

    def handed_over(self, topics: int, seconds: float) -> None:
        """Nothing."""

    def loaded(self, name: TopicName, load_s: float) -> None:
        """Nothing."""

    def cleaned(self, expired: int, purged: int) -> None:
        """Nothing."""
