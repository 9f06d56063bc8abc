"""What settings must be to each other: values that are fine alone, and could not work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.config.config import every_setting
from broker.config.problems import Problem
from broker.config.values import show_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from broker.config.config import Config

#: The first must be at least the second, else what the third says.
_AT_LEAST = (
    ("http.max_inflight_bytes", "http.max_body_bytes", "the largest body allowed would never be taken"),
    ("http.max_body_bytes", "topic.max_message_bytes", "the largest message allowed would fit into no body"),
    ("topic.mailbox_bytes", "http.max_body_bytes", "the largest body allowed would fit into no mailbox"),
)


def check_together(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Every pair of settings that cannot work together."""
    return [
        Problem(
            _both(origins[larger], origins[smaller]),
            f"{_shown(config, larger)} is less than {_shown(config, smaller)}",
            why,
        )
        for larger, smaller, why in _AT_LEAST
        if config.value(larger) < config.value(smaller)
    ]


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first}, {second}"


def _shown(config: Config, name: str) -> str:
    return f"{name} = {show_value(every_setting()[name].meaning, config.value(name))}"
