"""What was looked at, in tables for people and as JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.cli.options import show_length, show_time
from plainsong.cli.output import show_count

if TYPE_CHECKING:
    from pipeline.maintain.looking import Look
    from plainsong.transactions.values import Pruning

#: Above the rows of a topic's look.
HEADINGS = ("TOPIC", ">GEN", "EXPIRED BEFORE", ">EXPIRED ROWS", ">OLDER GENS", ">INVALID", ">PARTS")
#: Above a plan's.
PLAN_HEADINGS = ("TOPIC", "TABLE", "WHY", "FROM", "TO")


def row_of(look: Look) -> tuple[str, ...]:
    """A look below ``HEADINGS``."""
    limits = look.limits
    return (
        limits.name.topic,
        str(limits.generation),
        show_time(limits.expired_before_ms),
        show_count(look.waiting.expired) + ("+" if look.waiting.estimated else ""),
        show_count(limits.generation - 1),
        "?" if limits.invalid is None else show_count(len(limits.invalid)),
        show_count(len(look.parts)),
    )


def plan_rows(look: Look) -> list[tuple[str, ...]]:
    """Its parts below ``PLAN_HEADINGS``; keys in hex, without the topic's own bytes."""
    skip = len(str(look.limits.name)) + 1
    return [
        (look.limits.name.topic, part.table.name.lower(), part.why, part.start[skip:].hex(), part.stop[skip:].hex())
        for part in look.parts
    ]


def as_json(look: Look) -> dict[str, Any]:
    """A look for programs; keys whole, in hex."""
    limits = look.limits
    return {
        "topic": str(limits.name),
        "generation": limits.generation,
        "createdMs": look.waiting.created_ms,
        "expiredBeforeMs": limits.expired_before_ms,
        "expiredRows": look.waiting.expired,
        "estimated": look.waiting.estimated,
        "invalid": None if limits.invalid is None else [str(pointer) for pointer in limits.invalid],
        "snapshotPosition": None if limits.snapshot_position is None else limits.snapshot_position.hex(),
        "parts": [
            {
                "table": part.table.name.lower(),
                "why": part.why,
                "start": part.start.hex(),
                "stop": part.stop.hex(),
                "pointers": [str(pointer) for pointer in part.pointers],
            }
            for part in look.parts
        ],
    }


def pruning_facts(told: Pruning | str) -> list[tuple[str, str]]:
    """How far the list of invalid transactions may be pruned, or why nobody can say."""
    if isinstance(told, str):
        return [("invalid transactions", f"nobody can say: {told}")]
    return [
        ("invalid transactions", show_count(told.invalid)),
        ("safe bound", "none yet" if told.safe_bound is None else str(told.safe_bound)),
        ("longest life", show_length(told.max_lifetime_ms) if told.max_lifetime_ms else "without end"),
        ("pruned by itself", f"no: {told.kept_because}" if told.kept_because else "yes, after each complete pass"),
    ]


def pruning_json(told: Pruning | str) -> dict[str, Any]:
    """The same for programs; pointers as strings."""
    if isinstance(told, str):
        return {"unavailable": told}
    return {
        "invalid": told.invalid,
        "safeBound": None if told.safe_bound is None else str(told.safe_bound),
        "maxLifetimeMs": told.max_lifetime_ms,
        "keptBecause": told.kept_because,
    }
