"""What a change does, or with ``?dryRun=true`` would do, as its answer says it: the same fields for both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.api.route import json_answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from broker.http.messages import Answer

#: Messages that nothing happens to.
NOTHING: Mapping[str, object] = {"messages": 0, "bytes": 0, "estimated": False, "oldestMs": None, "newestMs": None}
#: Why a change that was made says nothing of its effect.
NOT_COUNTED = "the change was made, but what it came to could not be counted"


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
    """The answer to a change, or to its dry run.

    Args:
      etag: of the state that a dry run has looked at, or that a change has left.
      more: fields that the route has answered since before changes said what they come to.
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
) -> dict[str, Any]:
    """The fields of such an answer."""
    old, new = before or {}, after or {}
    return {
        "dryRun": dry_run,
        "action": action,
        "target": target,
        "before": before,
        "after": after,
        "changed": sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)),
        "effect": {"hides": NOTHING, "returns": NOTHING, "removes": NOTHING, **(effect or {})},
        "warnings": list(warnings),
        "etag": etag,
    }
