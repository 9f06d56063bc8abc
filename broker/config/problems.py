"""What can be wrong with the settings; all of it is told at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, where it was said, and what to do about it."""

    origin: str
    detail: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.detail}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(Exception):
    """The settings cannot be used. Nothing was opened; ``problems`` has every reason."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
