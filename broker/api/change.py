"""The answer to a change, and to its ``?dryRun=true``: both report the effect in the same fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from broker.api.answers import json_answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from broker.http.messages import Answer
    from plainsong.protocol.answers.topics import ChangeEffect, ChangeReport, MessageCount

#: The count for an effect that concerns no messages.
NOTHING: MessageCount = {"messages": 0, "bytes": 0, "estimated": False, "oldestMs": None, "newestMs": None}
#: Warning of a change whose effect could not be counted.
NOT_COUNTED = "the change was made, but its effect could not be counted"


def change_answer(
    action: str,
    target: str,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    *,
    dry_run: bool = True,
    effect: Mapping[str, Any] | None = None,
    warnings: Iterable[str] = (),
    etag: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Answer:
    """Return the answer to a change, or to its dry run.

    Args:
      etag: the ETag of the state that a dry run has read, or that a change has produced.
      more: fields that the route already had before changes reported their effect.
    """
    return json_answer(
        {**(more or {}), **change(action, target, before, after, dry_run, effect, warnings, etag)},
        headers=[] if etag is None else [("ETag", etag)],
    )


def change(
    action: str,
    target: str,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    dry_run: bool,
    effect: Mapping[str, Any] | None = None,
    warnings: Iterable[str] = (),
    etag: str | None = None,
) -> ChangeReport:
    """Return the fields of the answer."""
    old, new = before or {}, after or {}
    return {
        "dryRun": dry_run,
        "action": action,
        "target": target,
        "before": None if before is None else dict(before),
        "after": None if after is None else dict(after),
        "changed": sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)),
        "effect": cast("ChangeEffect", {"hides": NOTHING, "returns": NOTHING, "removes": NOTHING, **(effect or {})}),
        "warnings": list(warnings),
        "etag": etag,
    }
