"""What became of one attempt at one message: it is done, it is worth another attempt, or it never will be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from plainsong.messages import Message


@dataclass(frozen=True, slots=True)
class Done:
    """The effect has happened."""


@dataclass(frozen=True, slots=True)
class Again:
    """It has not, or nobody knows; another attempt may go better."""

    why: str
    """One line, for people and for dead letters."""
    pause_s: float = 0.0
    """How long whoever was asked wants to be left alone; 0: he did not say."""


@dataclass(frozen=True, slots=True)
class Never:
    """It has not, and this very message is the reason: no attempt will go better."""

    why: str
    """One line, for people and for dead letters."""


Verdict: TypeAlias = Done | Again | Never


class Effect(Protocol):
    """What is done about a message."""

    def __call__(self, message: Message, attempt: int) -> Verdict:
        """One attempt; the first is number 1. Raises Stopped when it was given up for the sake of an early end."""
        ...
