"""The small objects of the commit log: the seal that ends an epoch, and the lease; and the name of each object.

    log/<epoch>/<number>   a segment, or the seal
    lease.json             the highest epoch chosen, and the primary's heartbeat

Both are canonical JSON, so that equal ones have equal bytes. Epochs and numbers in names have twenty digits, so that
names sort as numbers do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from storage.replication.segment import RUN_BYTES, DamagedLog

LEASE = "lease.json"
#: The highest epoch, time or count. A larger one is damage: it would leave no room for later ones.
MAX_NUMBER = 1 << 62


def log_name(epoch: int, number: int) -> str:
    """Return the name of an object of the log."""
    return f"log/{epoch:020}/{number:020}"


@dataclass(frozen=True, slots=True)
class EpochSeal:
    """Ends an epoch. Nothing after it in the epoch counts."""

    next: int
    """The epoch that follows; its log belongs to the run that made the seal."""
    run: bytes
    """Distinguishes the seals of two runs that chose the same epoch, which happens where there is no lease."""
    clean: bool = False
    """The primary itself ended the epoch, and everything it had acknowledged counts."""
    gap: bool = False
    """Commits between this epoch and the next are missing from the log: only a later base covers them."""
    holder: str = ""
    """The machine of the process that made the seal, for people."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A standby's entry in the lease: it is ready to take over."""

    id: str
    """Chosen at the start of its process."""
    beat: int
    """Counts its registrations. The primary removes a standby whose count stops changing."""
    holder: str = ""
    """Its machine."""
    commit: int = 0
    """The last commit that it had applied when it registered."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The highest epoch that a run has chosen. It decides nothing by itself: the seal does."""

    epoch: int
    run: bytes
    holder: str = ""
    """The machine of the run."""
    urls: tuple[str, ...] = ()
    """Where clients reach the primary; none until it serves."""
    renewed: int = 0
    """Counts the renewals. A standby takes over if the count has not changed for ``period_ms``."""
    counted: int | None = None
    """The last commit that counted at the renewal."""
    period_ms: int = 0
    """How long a renewal lasts; 0: a standby takes over only by hand."""
    allows_standby: bool = True
    """False: no standby may register or take over."""
    released: bool = False
    """True if the run has ended its epoch with a clean seal, and no longer serves."""
    guarded: bool = True
    """True: once its lease is over, the primary acknowledges nothing that a take-over could lose, so a standby may then
    take over by itself."""
    standbys: tuple[Registration, ...] = ()
    """Registered standbys, ordered by id. Only ``guarded`` decides; these are the reason why it is set."""
    clock_ms: int | None = None
    """The wall clock of the primary at its last renewal, so that ids after a take-over begin above it; None in a lease of
    an earlier version."""

    @property
    def sign(self) -> tuple[int, bytes, int]:
        """Changes when the lease's run renews it, but not when a standby registers."""
        return self.epoch, self.run, self.renewed

    def registered(self, one: Registration) -> Lease:
        """Return the lease with a standby's registration, in place of its last one."""
        others = self.without(one.id).standbys
        return replace(self, standbys=tuple(sorted((*others, one), key=lambda each: each.id)))

    def without(self, identity: str) -> Lease:
        """Return the lease without a standby's registration."""
        return replace(self, standbys=tuple(each for each in self.standbys if each.id != identity))


def encode_seal(seal: EpochSeal) -> bytes:
    """Encode a seal."""
    fields = {"seal": True, "next": seal.next, "run": seal.run.hex(), "clean": seal.clean, "gap": seal.gap}
    return _canonical(fields | ({"holder": seal.holder} if seal.holder else {}))


def decode_seal(data: bytes) -> EpochSeal:
    """Decode a seal. Raises DamagedLog."""
    found = _parsed(data, "seal")
    following, clean, gap = found.get("next"), found.get("clean"), found.get("gap")
    if found.get("seal") is not True or not _is_number(following) or type(clean) is not bool or type(gap) is not bool:
        raise DamagedLog("a seal lacks a field, or a field has the wrong type or is out of range")
    assert isinstance(following, int)
    return EpochSeal(following, _run(found, "seal"), clean, gap, str(found.get("holder", "")))


def encode_lease(lease: Lease) -> bytes:
    """Encode a lease."""
    return _canonical(
        {
            "epoch": lease.epoch,
            "run": lease.run.hex(),
            "holder": lease.holder,
            "urls": lease.urls,
            "renewed": lease.renewed,
            "counted": lease.counted,
            "clockMs": lease.clock_ms,
            "periodMs": lease.period_ms,
            # Standbys of versions without registrations check only this before they take over.
            "allowsStandby": lease.allows_standby and lease.guarded,
            "released": lease.released,
            "standbys": {each.id: _registration(each) for each in lease.standbys} if lease.allows_standby else None,
        }
    )


def _registration(one: Registration) -> dict[str, Any]:
    return {"beat": one.beat, "holder": one.holder, "commit": one.commit}


def decode_lease(data: bytes) -> Lease:
    """Decode a lease; fields of later versions are ignored. Raises DamagedLog.

    A primary of a version without registrations is guarded whenever it allows a standby.
    """
    found = _parsed(data, "lease")
    if not _is_number(found.get("epoch")):
        raise DamagedLog("the lease has no epoch")
    run, counted, clock_ms = _run(found, "lease"), found.get("counted"), found.get("clockMs")
    guarded = bool(found.get("allowsStandby", True))
    try:
        standbys = found.get("standbys", {})
        return Lease(
            found["epoch"],
            run,
            str(found.get("holder", "")),
            # They are sent in a header, so other characters are refused.
            tuple(url for url in map(str, found.get("urls", ())) if url.isascii() and url.isprintable()),
            _number(found.get("renewed", 0)),
            None if counted is None else _number(counted),
            _number(found.get("periodMs", 0)),
            standbys is not None and (guarded or "standbys" in found),
            bool(found.get("released", False)),
            guarded,
            tuple(
                Registration(name, _number(each["beat"]), str(each["holder"]), _number(each["commit"]))
                for name, each in sorted((standbys or {}).items())
            ),
            None if clock_ms is None else _number(clock_ms),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedLog("a field of the lease has the wrong type, or is out of range") from error


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


def _number(value: object) -> int:
    """Return a number that can be counted on from. Raises ValueError."""
    if not _is_number(value):
        raise ValueError(f"{value!r:.40} is no number from 0 to {MAX_NUMBER}")
    assert isinstance(value, int)
    return value


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _parsed(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DamagedLog(f"the {what} is not a JSON object: {data[:40]!r}")
    return found


def _run(found: dict[str, Any], what: str) -> bytes:
    try:
        run = bytes.fromhex(found["run"])
    except (KeyError, TypeError, ValueError):
        run = b""
    if len(run) != RUN_BYTES:
        raise DamagedLog(f"the {what} names no run")
    return run
