"""Telling a quiet topic from one whose messages expired before they were read: when nothing was left to read in it.

The connector sees a position older than the topic's time to live, and has to take it for one behind which messages may
have expired. A run that had everything knows better: whatever came since is younger than that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pipeline.archive.files import LocalFiles
from plainsong.cli.options import now_ms
from plainsong.cli.verb import CommandFailed
from protocol.ids import unpack_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.audit.manifest import Manifest

#: Beside the manifest; lost, it is a false alarm at worst.
NOTES: Final = "caught-up.json"
#: A run that begins within this part of the ttl needs no look-out for losses.
SAFE_PART: Final = 0.5


@dataclass
class Quiet:
    """What is known of topics (`namespace:name`) with these times to live."""

    root: Path
    ttls_s: Mapping[str, int]
    _safe_until_ms: float = 0.0

    def note(self, manifest: Manifest, topic: str, asked_ms: int) -> None:
        """At `asked_ms` the topic held nothing that the tables of `manifest` do not tell of.

        That is worth a note only while nothing can have come after them and have expired.
        """
        since_ms = self._since_ms(manifest, topic)
        if since_ms is not None and asked_ms - since_ms < self.ttls_s[topic] * 1000:
            said = [manifest.lives.get(topic), manifest.through[topic], asked_ms]
            LocalFiles(self.root).write(NOTES, json.dumps({**self._notes(), topic: said}).encode())

    def is_safe(self, manifest: Manifest) -> bool:
        """Whether nothing after what the tables tell of can have expired yet; else somebody has to look out for it."""
        untils_ms = []
        for topic, ttl_s in self.ttls_s.items():
            since_ms = self._since_ms(manifest, topic)
            if since_ms is None:
                continue  # it is read from its beginning, whatever that is
            if now_ms() - since_ms > SAFE_PART * ttl_s * 1000:
                return False
            untils_ms.append(since_ms + ttl_s * 1000)
        self._safe_until_ms = min(untils_ms, default=0.0)
        return True

    def _since_ms(self, manifest: Manifest, topic: str) -> int | None:
        """Up to when it is known that the tables have all there was; None: they have nothing."""
        last = manifest.through.get(topic)
        if last is None:
            return None
        published_ms = unpack_id(bytes.fromhex(last)).publish_ts_ms
        match self._notes().get(topic):
            case [life, known, int(asked_ms)] if (life, known) == (manifest.lives.get(topic), last):
                return max(published_ms, asked_ms)
        return published_ms

    def is_old(self, manifest: Manifest) -> bool:
        """Whether the tables end where the connector would take messages for lost."""
        return any(
            unpack_id(bytes.fromhex(manifest.through[topic])).publish_ts_ms < now_ms() - ttl_s * 1000
            for topic, ttl_s in self.ttls_s.items()
            if topic in manifest.through
        )

    def check(self) -> None:
        """After a run that did not look out. Raises CommandFailed: it took so long that it should have."""
        if self._safe_until_ms and now_ms() > self._safe_until_ms:
            says = "the run took longer than messages live; some may have expired before they were read"
            raise CommandFailed(says, hint="run it more often, or raise the ttl")

    def _notes(self) -> dict[str, Any]:
        try:
            found = json.loads(LocalFiles(self.root).read(NOTES) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}
