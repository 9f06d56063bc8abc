"""Findings for operators: each instance reports its own, and any of them returns all, worst first."""

from __future__ import annotations

from time import perf_counter, time
from typing import TYPE_CHECKING, TypeAlias

import trio

from actors.store_time import SLACK_MS, shown_ms
from broker.finding import Finding, shown_bytes
from broker.link.flow import LinkBroken, Reply
from plainsong.protocol.errors import PlainsongError, Recovering, StorageFailed, TransactionsUnavailable
from plainsong.protocol.ids import after, published_ms
from plainsong.protocol.plurals import counted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from actors.directory import Directory
    from actors.observe import Clock, SpaceGuard
    from actors.ownership import Ownership
    from actors.store_time import StoreTime
    from broker.authority import Authority
    from broker.link.client import Links
    from broker.link.server import Call
    from broker.membership.membership import Membership
    from broker.metrics import Metrics
    from broker.tls import Certificates
    from plainsong.protocol.answers.service import Severity
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.state import TopicState

#: The maximum number of findings in an answer.
MAX_ITEMS = 100
#: After these times, warn about an undecided message, since it holds readers; and report it as critical.
HELD_MS = 60_000
LONG_HELD_MS = 600_000
OLD_TRANSACTION_MS = 600_000
#: Time for which a slow commit is reported.
SLOW_SYNC_SHOWN_S = 300.0
#: Warn about a certificate that expires within this time.
CERTIFICATE_SOON_S = 14 * 86_400
#: Time limit for answers of other instances.
ASK_TIMEOUT_S = 1.0
#: The call that returns the findings of an instance.
FINDINGS = "attention"
#: Topics checked in one turn of the event loop.
MANY = 100


#: Returns the findings of some part of this instance, without waiting.
Source: TypeAlias = "Callable[[], Sequence[Finding]]"


class Attention:
    """Findings of all instances. ``sources`` may be appended to."""

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        space: SpaceGuard,
        min_free_bytes: int,
        authority: Authority,
        metrics: Metrics,
        ownership: Ownership | None,
        membership: Membership | None,
        links: Links | None,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._space = space
        self._min_free_bytes = min_free_bytes
        self._authority = authority
        self._metrics = metrics
        self._ownership = ownership
        self._membership = membership
        self._links = links
        self.sources: list[Source] = [self._disk, self._sync, self._instances]

    async def findings(self) -> list[Finding]:
        """Return the findings of all instances, worst first, without duplicates."""
        found = set(await self._here())
        await self._ask_others(found)
        return sorted(found, key=lambda each: each.rank)

    async def handler(self, call: Call) -> Reply:
        """Answer another instance's call."""
        del call
        return Reply([list(each) for each in sorted(await self._here(), key=lambda each: each.rank)[:MAX_ITEMS]])

    async def _here(self) -> list[Finding]:
        found = [finding for source in self.sources for finding in source()]
        found += [finding async for finding in self._topics()]
        return found + await self._transactions()

    async def _ask_others(self, found: set[Finding]) -> None:
        ownership, links = self._ownership, self._links

        async def ask(name: str, address: str) -> None:
            assert links is not None
            try:
                with trio.fail_after(ASK_TIMEOUT_S):
                    link = await links.to(address)
                    found.update(Finding(*each) for each in (await link.call(FINDINGS, None)).value)
            except (LinkBroken, PlainsongError, trio.TooSlowError):
                found.add(_unreachable(name))

        if ownership is not None and links is not None:
            async with trio.open_nursery() as nursery:
                for instance in ownership.instances:
                    if instance.name != ownership.me.name:
                        nursery.start_soon(ask, instance.name, instance.address)

    # --- topics -----------------------------------------------------------------------------------

    async def _topics(self) -> AsyncIterator[Finding]:
        now_ms = self._clock.now_ms()
        for number, entry in enumerate(self._directory):
            if number % MANY == MANY - 1:
                await trio.lowlevel.checkpoint()  # do not hold the event loop
            name = entry.name
            if self._ownership is not None and not self._ownership.is_mine(name):
                continue
            why = None if entry.mailbox.closed_for is None else entry.mailbox.closed_for()
            if isinstance(why, Recovering | StorageFailed):
                text = f"The topic cannot be loaded: {why.detail}"
                yield Finding("damaged", "critical", str(name), text, link=_page(name), topic=str(name))
            core = entry.actor.core
            if core is None or core.state.metadata is None or core.state.metadata.deleted_ms is not None:
                continue
            held = self._held(name, core.state, now_ms)
            if held is not None:
                yield held
            for reader, kept in core.state.readers.items():
                if core.state.usage.expired_from(after(kept.position), core.state.oldest_ms):
                    text = f"Messages may have expired before reader {reader} read them"
                    subject = f"{name}/{reader}"
                    yield Finding("expired-unread", "warning", subject, text, link=_page(name), topic=str(name))

    def _held(self, name: TopicName, state: TopicState, now_ms: int) -> Finding | None:
        """Report the transaction that has held committed readers for a long time."""
        for pending in state.pending.values():
            if pending.pointer <= 0 or not pending.runs or pending.decided or self._is_over(pending.pointer):
                continue
            since_ms = published_ms(pending.runs[0].first)
            if now_ms - since_ms < HELD_MS:
                return None
            hidden = min(pending.hidden(state.appended), state.usage.messages)
            text = f"Transaction {pending.pointer} is undecided and hides {counted(hidden, 'message')} from committed readers"
            severity: Severity = "critical" if now_ms - since_ms >= LONG_HELD_MS else "warning"
            return Finding("held-reader", severity, str(name), text, since_ms, _page(name), str(name))
        return None

    def _is_over(self, pointer: int) -> bool:
        try:
            return self._authority.transactions.standing(pointer) in ("committed", "aborted", "invalid")
        except TransactionsUnavailable:
            return False

    # --- the service ------------------------------------------------------------------------------

    async def _transactions(self) -> list[Finding]:
        embedded = self._authority.embedded
        if embedded is None:
            return []
        try:
            figures = await embedded.listed("in_progress", MAX_ITEMS)
        except PlainsongError:
            return []  # the service is unavailable, or moving
        old_ms = self._clock.now_ms() - OLD_TRANSACTION_MS
        return [
            Finding(
                "old-transaction",
                "warning",
                str(each.transaction_id),
                f"The transaction{f' of {each.client_id}' if each.client_id else ''} has been open for a long time",
                each.started_ms,
                f"/console/transactions?open={each.transaction_id}",
            )
            for each in figures
            if each.started_ms < old_ms
        ]

    def _disk(self) -> list[Finding]:
        free = self._space.free_bytes
        if free is None:
            return []
        subject = "" if self._ownership is None else self._ownership.me.name
        if self._space.low:
            text = (
                f"Publishes are refused: only {shown_bytes(free)} of disk space is free, less than "
                "storage.min_free_bytes"
            )
            return [Finding("low-space", "critical", subject, text, link="/console/cluster")]
        if free < 2 * self._min_free_bytes:
            limit = shown_bytes(self._min_free_bytes)
            text = f"Only {shown_bytes(free)} of disk space is free; publishes are refused below {limit}"
            return [Finding("disk", "warning", subject, text, link="/console/cluster")]
        return []

    def _sync(self) -> list[Finding]:
        slow = self._metrics.slow_commit
        age_s = 0.0 if slow is None else perf_counter() - slow.at_s
        if slow is None or age_s > SLOW_SYNC_SHOWN_S:
            return []
        subject = "" if self._ownership is None else self._ownership.me.name
        text = f"A commit took {slow.seconds:.1f} s to become durable"
        since_ms = self._clock.now_ms() - round(age_s * 1000)
        return [Finding("slow-sync", "warning", subject, text, since_ms, "/console/cluster")]

    def _instances(self) -> list[Finding]:
        membership = self._membership
        if membership is None:
            return []
        found = []
        if not membership.connected:
            text = "ZooKeeper does not answer this instance: it serves its topics, but they cannot move"
            found.append(
                Finding("instance", "critical", membership.me.name, text, membership.since_ms, "/console/cluster")
            )
        if membership.kept_out_by is not None:
            text = (
                "This instance owns no topics: its cluster.secret_file differs from that of the instance at "
                f"{membership.kept_out_by}"
            )
            found.append(Finding("instance", "critical", membership.me.name, text, link="/console/cluster"))
        lost = {} if self._links is None else self._links.unreachable
        return found + [_unreachable(each.name) for each in membership.instances if each.address in lost]


def clock_findings(store_time: StoreTime) -> list[Finding]:
    """Report a clock that is behind the store's times by more than the tolerated difference between clocks."""
    behind_ms = store_time.behind_ms()
    if behind_ms <= SLACK_MS:
        return []
    text = (
        f"The clock is {shown_ms(behind_ms)} behind the newest time in the store: until it catches up, publish times "
        "stand still, and messages expire later"
    )
    return [Finding("clock", "warning", "clock", text, link="/console/cluster")]


def stale_files(stale: Callable[[], Mapping[str, str] | None]) -> list[Finding]:
    """Report files of tokens and grants that could not be reloaded. ``stale`` is ``Security.stale``."""
    found = stale()
    if found is None:
        return []
    text = f"The changed files cannot be used, and the previous ones stay in force: {found['why']}"
    return [Finding("reload", "warning", "security", text, link="/console/cluster")]


def certificate_findings(certificates: Certificates, clock: Callable[[], float] = time) -> list[Finding]:
    """Report a certificate that expires soon, has expired, or could not be reloaded."""
    found = []
    if certificates.stale is not None:
        text = f"The changed files cannot be used, and the previous certificate stays in force: {certificates.stale}"
        found.append(Finding("reload", "warning", "tls.certificate", text, link="/console/cluster"))
    left_s = certificates.now.not_after_s - clock()
    if left_s < CERTIFICATE_SOON_S:
        text = "The certificate has expired" if left_s <= 0 else f"The certificate expires in {left_s / 86400:.1f} days"
        severity: Severity = "critical" if left_s <= 0 else "warning"
        found.append(Finding("certificate", severity, "tls.certificate", text, link="/console/cluster"))
    return found


def _unreachable(name: str) -> Finding:
    return Finding("instance", "critical", name, "Other instances cannot reach this one", link="/console/cluster")


def _page(name: TopicName) -> str:
    return f"/console/topics/{name.namespace}/{name.topic}"
