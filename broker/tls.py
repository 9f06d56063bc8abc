"""The daemon's certificate: loaded, checked, and reloaded when its files change; and TLS settings for connections."""

from __future__ import annotations

import logging
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from broker.security.files import FileUnusable, read_named, stamp_of, why_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from cryptography import x509

    from broker.config import Config
    from broker.config.sections import TlsConfig
    from broker.security.files import Stamp

log = logging.getLogger("plainsong.tls")
#: Only forward secrecy and authenticated encryption; TLS 1.3 has nothing else.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
ALPN = ("h2", "http/1.1")
MAX_FILE_BYTES = 1 << 20
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_DEMANDS = {"off": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of loading the files."""

    server: ssl.SSLContext
    """For accepted connections; with ALPN for HTTP."""
    links: ssl.SSLContext
    """For links to other instances, with the same certificate."""
    names: frozenset[str]
    """Its DNS names."""
    not_after_s: float
    """When it expires, in seconds since 1970."""


class Certificates:
    """The certificate in use, kept up to date with its files.

    Args:
      settings: must name a certificate.
      clock: returns seconds since 1970.
      by_name: links verify that the other's certificate is valid for the host of its address.
    Raises:
      FileUnusable: the files cannot be used.
    """

    def __init__(self, settings: TlsConfig, clock: Callable[[], float] = time.time, *, by_name: bool = False) -> None:
        self._settings = settings
        self._clock = clock
        self._by_name = by_name
        self._paths = [Path(path) for path in (settings.certificate, settings.key, settings.client_ca) if path]
        self._seen = self._stamps()
        self._failed: list[Stamp | None] | None = None
        self.now = load(settings, clock(), by_name=by_name)
        #: Number of failed reloads.
        self.failures = 0
        #: Why the current files cannot be used; None if they are in use.
        self.stale: str | None = None
        #: Called with the result of each handshake: ``ok``, ``failed``, ``timeout``, ``plain`` (not TLS at all).
        self.on_handshake: Callable[[str], None] = lambda result: None
        self._on_names: Callable[[frozenset[str]], None] = lambda names: None

    def context(self) -> ssl.SSLContext:
        """Return the context for the next accepted connection."""
        return self.now.server

    def look_again(self) -> None:
        """Reload the files, whether or not they have changed."""
        self.look(again=True)

    def report_names_to(self, on_names: Callable[[frozenset[str]], None]) -> None:
        """Call ``on_names`` now, and after each reload."""
        self._on_names = on_names
        on_names(self.now.names)

    def count(self, result: str) -> None:
        """Count a handshake."""
        self.on_handshake(result)

    def look(self, *, again: bool = False) -> None:
        """Reload the files if they have changed, or if ``again``; unusable files change nothing.

        The two files of a pair are replaced one after the other, so a mismatch is an error only if it persists.
        """
        stamps = self._stamps()
        if stamps == self._seen and not again:
            return
        try:
            self.now = load(self._settings, self._clock(), by_name=self._by_name)
        except FileUnusable as error:
            if stamps == self._failed or again:
                self._seen = stamps
                self.failures += 1
                self.stale = f"{error.setting}: {error.why}"
                log.error(
                    "the certificate could not be reloaded; the previous one stays",
                    extra={"setting": error.setting, "why": error.why},
                )
            self._failed = stamps
            return
        self._seen, self._failed, self.stale = stamps, None, None
        self._on_names(self.now.names)
        log.info("the certificate was loaded", extra={"not_after": _written(self.now.not_after_s)})

    async def watch(self, reload_s: float) -> NoReturn:
        """Check the files every ``reload_s`` seconds, until cancelled; 0: never."""
        while True:
            await trio.sleep(reload_s or float("inf"))
            self.look()

    def _stamps(self) -> list[Stamp | None]:
        return [stamp_of(path) for path in self._paths]


def certificates_of(config: Config) -> Certificates | None:
    """Return the certificate of ``config``; None if it has none. Raises FileUnusable."""
    if not config.tls.certificate:
        return None
    # The proof of a common secret authenticates the other end better than its name; without one, the name has to.
    return Certificates(config.tls, by_name=not config.cluster.secret_file)


def load(settings: TlsConfig, now_s: float, *, by_name: bool = False) -> Certificate:
    """Load and check the files of ``settings``. Raises FileUnusable."""
    first = _first_certificate(settings.certificate)
    if not first.not_valid_before_utc.timestamp() <= now_s <= first.not_valid_after_utc.timestamp():
        valid = f"from {first.not_valid_before_utc:%Y-%m-%d %H:%M} to {first.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise FileUnusable("tls.certificate", f"{settings.certificate} is valid {valid}, which is not now", "renew it")
    _check_key(settings.key, "tls.key")
    server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
    server.set_alpn_protocols(ALPN)
    server.verify_mode = _DEMANDS[settings.client_certificates]
    links = _context(ssl.PROTOCOL_TLS_CLIENT, settings)
    links.check_hostname = by_name
    return Certificate(server, links, _dns_names(first), first.not_valid_after_utc.timestamp())


def gateway_context(ca: str, certificate: str, key: str, *, named: str) -> ssl.SSLContext:
    """Return the context of connections to a server whose certificate is signed by ``ca`` and valid for its host name.

    Args:
      certificate, key: the client certificate; empty: none.
      named: the setting of each file, with ``{}`` for ca, certificate and key.
    Raises:
      FileUnusable: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    _trust(context, named.format("ca"), ca)
    if certificate:
        _check_key(key, named.format("key"))
        _show(context, certificate, key, named.format("key"))
    return context


def _context(protocol: int, settings: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = _VERSIONS[settings.minimum]
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    _show(context, settings.certificate, settings.key, "tls.key")
    if settings.client_ca:
        _trust(context, "tls.client_ca", settings.client_ca)
    return context


def _show(context: ssl.SSLContext, certificate: str, key: str, setting: str) -> None:
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as error:
        why = f"{certificate} and {key} do not match: {_reason(error)}"
        raise FileUnusable(setting, why, "PEM, the key without a password") from error


def _trust(context: ssl.SSLContext, setting: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise FileUnusable(setting, f"{path}: {_reason(error)}", "certificates, PEM") from error


def _refuse_password() -> str:
    raise ValueError("it is encrypted with a password")


def _check_key(path: str, setting: str) -> None:
    read_named(setting, path, MAX_FILE_BYTES, "chmod 600, owned by the daemon's user or root")


def _first_certificate(path: str) -> x509.Certificate:
    """Return the daemon's own certificate, which comes first; those of authorities follow."""
    from cryptography import x509  # slow to load, and needed only with TLS

    try:
        with Path(path).open("rb") as file:
            return x509.load_pem_x509_certificates(file.read(MAX_FILE_BYTES))[0]
    except (OSError, ValueError) as error:
        raise FileUnusable("tls.certificate", f"{path}: {_reason(error)}", "certificates, PEM") from error


def _dns_names(certificate: x509.Certificate) -> frozenset[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(name.lower().removesuffix(".") for name in names.get_values_for_type(x509.DNSName))


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return why_of(error)


def _written(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
