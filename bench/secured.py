"""Cost of names, quotas and TLS for a small publish, each compared with a plain daemon, alternately.

To run it alone, in about four minutes: ``nice -n -19 python -m bench secured``.
"""

from __future__ import annotations

import random
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

from bench.bodies import AVRO_TYPE, path, payloads
from bench.daemon import daemon
from bench.generator import load
from bench.load import post
from bench.rounds import Row, Section, Spread, in_turns
from broker.security.files import write_guarded
from broker.security.tokens import TokenEntry, format_tokens, hash_of, id_of, new_token
from plainsong.protocol.codec import AVRO
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bench.daemon import Daemon
    from bench.profiles import Profile

SAYS = """Single publishes of 100 B a second at 16 connections, each acknowledged after it was synced: by a daemon that
requires a token and has a thousand grants (*names*), by one where that name has quotas as well (*quotas*), and by one
that speaks TLS 1.3, each compared with one that does neither (*÷ plain*). *Again* is a second daemon without any of it:
its difference from the first is noise. CPU is the daemon's processor time per publish, user and system, in µs, over all
rounds; its range is that of the rounds. Both sides of a row have the same load generator: for TLS it is the one in
Python, whose own TLS affects the rates."""

CONNECTIONS = 16
GRANTS = 1_000
MESSAGE_BYTES = 100
TOPIC = "t"
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
    "-addext subjectAltName=IP:127.0.0.1 -keyout {0}/tls.key -out {0}/tls.pem"
)


def measure_secured(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure names and quotas, then TLS; the daemons run throughout and are measured alternately."""
    section = Section("secured", "Names, quotas and TLS", SAYS)
    with ExitStack() as stack:

        def start(name: str, **settings: object) -> Daemon:
            return stack.enter_context(daemon(scratch / name, **settings))

        plain, again = start("plain"), start("again")
        for each in (plain, again):
            each.create(TOPIC)
        token, files = _files(scratch)
        named = start("named", security_authentication="required", **files)
        limited_files = {**files, "security_grants_file": _with_quotas(files["security_grants_file"])}
        limited = start("limited", security_authentication="required", **limited_files)
        for each in (named, limited):
            each.create(TOPIC, f"Bearer {token}")
        _measure(
            section,
            say,
            _Side(plain, profile),
            {
                "again": _Side(again, profile),
                "names": _Side(named, profile, token=token),
                "quotas": _Side(limited, profile, token=token),
            },
            max(1, 6 * (profile.rounds - 1)),
        )
        subprocess.run(CERTIFICATE.format(scratch).split(), check=True, capture_output=True)
        authority = scratch / "tls.pem"
        by_tls = start("tls", tls_certificate=authority, tls_key=scratch / "tls.key")
        by_tls.create(TOPIC, authority=authority)
        _measure(
            section,
            say,
            _Side(plain, profile, pure=True),
            {"TLS": _Side(by_tls, profile, authority=authority)},
            max(1, 4 * (profile.rounds - 1)),
        )
    return section


def _measure(
    section: Section, say: Callable[[str], None], plain: _Side, sides: Mapping[str, _Side], rounds: int
) -> None:
    """Add a row for each side, all compared with the same plain one."""
    rates = in_turns({"plain": plain.rate, **{what: side.rate for what, side in sides.items()}}, rounds)
    for what, side in sides.items():
        more = [secured - without for secured, without in zip(side.cpu_us, plain.cpu_us, strict=True)]
        values = {
            "plain": Spread.of(rates["plain"]),
            "secured": Spread.of(rates[what]),
            "÷ plain": Spread.ratio(rates[what], rates["plain"]),
            "CPU plain": _around(plain.total_us, plain.cpu_us),
            "CPU secured": _around(side.total_us, side.cpu_us),
            "CPU ÷ plain": _around(side.total_us / plain.total_us, _ratios(side.cpu_us, plain.cpu_us)),
            "CPU more": _around(side.total_us - plain.total_us, more),
        }
        section.rows.append(Row({"what": what, "connections": CONNECTIONS}, values))
        say(f"{what}: " + "  ".join(f"{name} {value.median:.2f}" for name, value in values.items()))


def _around(total: float, rounds: Sequence[float]) -> Spread:
    """Return the value over all rounds, with the lowest and the highest round."""
    return Spread(total, min(total, *rounds), max(total, *rounds))


def _ratios(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, baseline, strict=True)]


class _Side:
    """One daemon under load: its rates, and the processor time of a publish."""

    def __init__(
        self,
        running: Daemon,
        profile: Profile,
        *,
        token: str | None = None,
        authority: Path | None = None,
        pure: bool = False,
    ) -> None:
        """``pure``: use the generator in Python, which ``authority``, the CA file for TLS, implies."""
        self._running = running
        self._seconds = 2 * profile.seconds
        headers = [AVRO_TYPE] if token is None else [AVRO_TYPE, f"Authorization: Bearer {token}"]
        body = AVRO.encode_publish(PublishRequest(payloads(1, MESSAGE_BYTES)))
        self._request = post(path(TOPIC, "publish"), body, headers)
        self._pure, self._authority = pure, authority
        self._cpu_s, self._requests = 0.0, 0
        #: One value per round; processor time is counted in hundredths of a second, so rounds differ by some percent.
        self.cpu_us: list[float] = []

    @property
    def total_us(self) -> float:
        """Return the processor time of a publish over all rounds."""
        return self._cpu_s / self._requests * 1e6

    def rate(self) -> float:
        before_s = self._running.cpu_s()
        warm_up = 2 * CONNECTIONS
        with load(
            self._running.port,
            CONNECTIONS,
            self._request,
            self._seconds,
            warm_up,
            pure=self._pure,
            authority=self._authority,
        ) as running:
            result = running.end()
        spent_s, requests = self._running.cpu_s() - before_s, result["requests"] + warm_up
        self._cpu_s, self._requests = self._cpu_s + spent_s, self._requests + requests
        self.cpu_us.append(spent_s / requests * 1e6)
        return float(result["requests_per_s"])


def _files(folder: Path) -> tuple[str, dict[str, Path]]:
    """Return a token, and the settings for its file and for a thousand grants, the last of which allows publishing."""
    token = new_token(random.SystemRandom().choice)
    hashed = hash_of(token)
    tokens, grants = folder / "tokens.json", folder / "grants.toml"
    write_guarded(tokens, format_tokens([TokenEntry(id_of(hashed), "bench", hashed, 0, None)]))
    others = [
        f'[[grant]]\nto = ["bench", "other-{number}"]\nverbs = ["publish"]\non = ["space{number}:*"]\n'
        for number in range(GRANTS - 1)
    ]
    last = '[[grant]]\nto = ["bench"]\nverbs = ["all"]\non = ["bench:*"]\n'
    write_guarded(grants, "\n".join(["format = 1", *others, last]).encode())
    return token, {"security_tokens_file": tokens, "security_grants_file": grants}


def _with_quotas(grants: Path) -> Path:
    """Write the same grants with quotas that no name reaches; return the file."""
    limits = '\n[[quota]]\nto = ["*"]\npublish_requests_per_s = 1000000\npublish_bytes_per_s = "1 GiB"\n'
    limited = grants.with_name("limited.toml")
    write_guarded(limited, grants.read_bytes() + limits.encode())
    return limited
