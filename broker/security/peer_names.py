"""Names that connections themselves prove: of verified client certificates, and of users connected by Unix sockets."""

from __future__ import annotations

import pwd
from functools import lru_cache
from typing import TYPE_CHECKING

from broker.security.identity import Identity
from broker.security.tokens import is_name

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from broker.security.peer import Peer


class ConnectionNames:
    """Finds the name of a connection's peer.

    Args:
      kind: ``security.certificate_name``.
      unix: ``security.unix_names``.
    """

    def __init__(self, kind: str, *, unix: bool) -> None:
        self._kind = kind
        self._unix = unix

    def __call__(self, peer: Peer) -> Identity | None:
        """Return the identity; None if the connection proves none."""
        if peer.certificate is not None:
            return certificate_identity(peer.certificate, self._kind)
        if self._unix and peer.unix is not None:
            return _user_identity(peer.unix.uid)
        return None


@lru_cache(maxsize=1000)
def certificate_identity(der: bytes, kind: str) -> Identity | None:
    """Return the name in a verified certificate: ``cert:`` and the first of its kind (RFC 8705, section 2.1.2)."""
    from cryptography import x509  # needed only with client certificates

    try:
        certificate = x509.load_der_x509_certificate(der)
        found = _name_in(certificate, kind)
    except ValueError:
        return None
    name = f"cert:{found}"
    if not found or not is_name(name):
        return None
    expires_ms = int(certificate.not_valid_after_utc.timestamp() * 1000)
    return Identity(name, "cert", f"{certificate.serial_number:x}"[:40], expires_ms=expires_ms)


def _name_in(certificate: Certificate, kind: str) -> str:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    if kind == "subject-dn":
        return certificate.subject.rfc4514_string()
    if kind == "subject-cn":
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(names[0].value) if names else ""
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    if kind == "san-uri":
        return next(iter(alternatives.get_values_for_type(x509.UniformResourceIdentifier)), "")
    return next(iter(alternatives.get_values_for_type(x509.DNSName)), "")


@lru_cache(maxsize=1000)
def _user_identity(uid: int) -> Identity | None:
    try:
        name = f"unix:{pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return None
    return Identity(name, "unix", str(uid)) if is_name(name) else None
