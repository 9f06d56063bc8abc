"""Authorities and certificates for tests, generated on demand."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from typing import TYPE_CHECKING, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DAY = datetime.timedelta(days=1)


class Pair(NamedTuple):
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates, and writes their files to ``directory``."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = (
            _builder(subject, subject, self._key, -DAY, 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        #: The authority's own certificate.
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        file: str,
        *names: str,
        addresses: Sequence[str] = ("127.0.0.1", "::1"),
        uris: Sequence[str] = (),
        common_name: str = "tests",
        begins: datetime.timedelta = -DAY,
        ends: datetime.timedelta = 10 * DAY,
    ) -> Pair:
        """Issue a certificate for these DNS names; replace an existing ``file``, as a renewal does."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        alternatives = [
            *(x509.DNSName(name) for name in names),
            *(x509.UniformResourceIdentifier(uri) for uri in uris),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
        ]
        builder = _builder(subject, self._certificate.subject, key, begins, ends)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pair = Pair(self._directory / f"{file}.pem", self._directory / f"{file}.key")
        encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        _replace(pair.certificate, certificate.public_bytes(encoding) + self.file.read_bytes())
        _replace(pair.key, key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
        return pair

    def trusting(self, pair: Pair | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts only this authority and uses ``pair``."""
        context = ssl.create_default_context(cafile=self.file)
        if pair is not None:
            context.load_cert_chain(pair.certificate, pair.key)
        return context


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begins: datetime.timedelta,
    ends: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
    )


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.chmod(0o600)
    os.rename(new, path)
