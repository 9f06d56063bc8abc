"""How far the tables are behind their topics: the age of the oldest message that waits, as the daemon tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from plainsong.cli.options import now_ms
from protocol.errors import PlainsongError
from protocol.ids import FIRST_BOUND, after

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.audit.manifest import Manifest
    from pipeline.audit.quiet import Quiet
    from pipeline.job import Run
    from plainsong import Client
    from plainsong.messages import Seen

#: Messages that nobody waits for: readers of committed ones pass over them.
_PASSED_OVER: Final = ("rolled-back", "invalid")
#: How many messages are looked at, page by page, for the first that waits; it is nearly always the first of all.
_PAGES: Final = (1, 100, 1000, 1000)


class Behind:
    """What waits in topics, told as metrics.

    Args:
      ttls_s: by topic (`namespace:name`).
      quiet: is told when nothing waits.
      uncommitted: the tables take messages of any transaction, so that those rolled back wait, too.
    """

    def __init__(self, run: Run, client: Client, ttls_s: Mapping[str, int], quiet: Quiet, *, uncommitted: bool) -> None:
        self._run = run
        self._client = client
        self._ttls_s = ttls_s
        self._quiet = quiet
        self._uncommitted = uncommitted

    def tell(self, manifest: Manifest) -> float:
        """Ask, and set the metrics of each topic; the greatest age in seconds.

        A daemon that does not answer leaves them as they were: a run does not end of what is only told.
        """
        ages_s = [0.0]
        for topic, ttl_s in self._ttls_s.items():
            name, asked_ms = topic.partition(":")[2], now_ms()
            try:
                age_s = self._age_s(name, manifest.through.get(topic))
            except PlainsongError:
                continue
            if age_s == 0:
                self._quiet.note(manifest, topic, asked_ms)
            self._run.metrics.set("lag_seconds", age_s, topic=name)
            self._run.metrics.set("ttl_used_ratio", age_s / ttl_s, topic=name)
            ages_s.append(age_s)
        self._run.metrics.write()
        return max(ages_s)

    def _age_s(self, topic: str, last: str | None) -> float:
        """Of the oldest message after `last` that a run takes, now or when it is decided; 0 when there is none."""
        start = FIRST_BOUND if last is None else after(bytes.fromhex(last))
        seen: Sequence[Seen] = ()
        for limit in _PAGES:
            page = self._client.messages(topic, start, limit=limit)
            for each in page:
                if self._uncommitted or each.state not in _PASSED_OVER:
                    return _age_s(each)
            if not page:
                return 0.0
            seen, start = page, after(bytes(page[-1].id))
        # What waits, if anything, is younger than all these that are passed over.
        return _age_s(seen[-1])


def _age_s(message: Seen) -> float:
    return max(0.0, (now_ms() - message.publish_time_ms) / 1000)
