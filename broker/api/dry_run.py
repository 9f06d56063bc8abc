"""The answer to ``?dryRun=true``, which checks as the change does, counts, and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.api.route import json_answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from broker.http.messages import Answer

#: Messages that nothing happens to.
NOTHING: Mapping[str, object] = {"messages": 0, "bytes": 0, "estimated": False, "oldestMs": None, "newestMs": None}


def preview(
    action: str,
    target: str,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    *,
    effect: Mapping[str, Any] | None = None,
    warnings: Iterable[str] = (),
    etag: str | None = None,
) -> Answer:
    """The answer to a dry run."""
    old, new = before or {}, after or {}
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return json_answer(
        {
            "dryRun": True,
            "action": action,
            "target": target,
            "before": before,
            "after": after,
            "changed": changed,
            "effect": {"hides": NOTHING, "returns": NOTHING, "removes": NOTHING, **(effect or {})},
            "warnings": list(warnings),
            "etag": etag,
        },
        headers=[] if etag is None else [("ETag", etag)],
    )
