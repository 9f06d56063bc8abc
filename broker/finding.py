"""One instance's findings for operators; ``broker.attention`` collects and sorts them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal[
    "held-reader",
    "old-transaction",
    "expired-unread",
    "disk",
    "slow-sync",
    "certificate",
    "reload",
    "audit",
    "damaged",
    "unread",
    "low-space",
    "replication",
    "instance",
    "clock",
]
Severity: TypeAlias = Literal["warning", "critical"]


def shown_bytes(count: int) -> str:
    """Format a size for people: ``512 B``, ``234.1 MiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


class Finding(NamedTuple):
    """A finding for operators."""

    kind: Kind
    severity: Severity
    subject: str
    text: str
    since_ms: int | None = None
    link: str = ""
    """The page of the console that shows it."""
    topic: str = ""
    """``namespace:topic``; empty if it is about the service."""

    def shown(self) -> dict[str, Any]:
        """Return the finding as the API shows it."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "subject": self.subject,
            "text": self.text,
            "sinceMs": self.since_ms,
            "link": self.link,
        }

    @property
    def rank(self) -> tuple[object, ...]:
        """Sort key: worst first, then the longest lasting; ties are in a stable order."""
        lasts = self.since_ms if self.since_ms is not None else 1 << 62
        return self.severity != "critical", lasts, self.kind, self.subject
