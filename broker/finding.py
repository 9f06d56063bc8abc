"""One instance's findings for operators; ``broker.attention`` collects and sorts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from plainsong.protocol.answers.service import FindingKind, FindingRow, Severity


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

    kind: FindingKind
    severity: Severity
    subject: str
    text: str
    since_ms: int | None = None
    link: str = ""
    """The page of the console that shows it."""
    topic: str = ""
    """``namespace:topic``; empty if it is about the service."""

    def shown(self) -> FindingRow:
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
