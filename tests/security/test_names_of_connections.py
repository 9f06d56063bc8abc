"""Authentication by client certificate or Unix socket user, and masking of credentials in text."""

from __future__ import annotations

import datetime
import os
import pwd

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from broker.http.messages import answer_for
from broker.security.guard import Guard
from broker.security.peer import Peer, UnixPeer
from broker.security.peer_names import ConnectionNames
from plainsong.protocol.errors import InvalidParameter, Unauthenticated
from plainsong.protocol.masking import masked
from tests.security.test_tokens import TOKEN

JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln"


def certificate(common_name="ledger", dns=("ledger.internal", "other"), uris=("spiffe://x/ledger",)):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    alternatives = [*map(x509.DNSName, dns), *map(x509.UniformResourceIdentifier, uris)]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(0xABC)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=10_000))
    )
    if alternatives:
        made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("san-dns", "cert:ledger.internal"),
        ("san-uri", "cert:spiffe://x/ledger"),
        ("subject-cn", "cert:ledger"),
        ("subject-dn", "cert:CN=ledger"),
    ],
)
def test_a_certificate_names_its_holder_by_the_first_of_its_kind(kind, name):
    found = ConnectionNames(kind, unix=False)(Peer(certificate=certificate()))
    assert (found.name, found.via, found.credential) == (name, "cert", "abc")


def test_a_certificate_without_that_kind_or_without_a_name_names_no_one():
    assert ConnectionNames("san-dns", unix=False)(Peer(certificate=certificate(dns=()))) is None
    assert ConnectionNames("san-dns", unix=False)(Peer(certificate=certificate(dns=(), uris=()))) is None
    assert ConnectionNames("subject-cn", unix=False)(Peer(certificate=certificate("a b"))) is None
    assert ConnectionNames("subject-cn", unix=False)(Peer(certificate=b"nonsense")) is None


@given(st.binary(max_size=400))
def test_any_bytes_of_a_certificate_name_its_holder_or_no_one(data):
    assert ConnectionNames("san-dns", unix=False)(Peer(certificate=data)) is None


def test_the_peer_of_a_unix_socket_is_its_user_if_configured():
    peer = Peer("unix", unix=UnixPeer(1, os.getuid(), os.getgid()))
    user = pwd.getpwuid(os.getuid()).pw_name
    assert ConnectionNames("san-dns", unix=True)(peer).name == f"unix:{user}"
    assert ConnectionNames("san-dns", unix=False)(peer) is None
    assert ConnectionNames("san-dns", unix=True)(Peer("unix", unix=UnixPeer(1, 4_000_000, 1))) is None


def test_a_bad_token_is_refused_even_if_the_certificate_would_be_sufficient():
    guard = Guard(required=True, peer_names=ConnectionNames("san-dns", unix=False))
    peer = Peer(certificate=certificate())
    assert guard.admit_now({}, peer).who.name == "cert:ledger.internal"
    with pytest.raises(Unauthenticated, match="unknown token"):
        guard.admit_now({"authorization": f"Bearer {TOKEN}"}, peer)


# --- masks -----------------------------------------------------------------------------------------


@given(st.text("ab .=\"'/", max_size=20), st.text(" .=\"'/", max_size=20))
def test_credentials_are_masked_and_other_text_is_not(before, behind):
    text = masked(f"{before} {TOKEN}{behind} {JWT} end")
    assert text == f"{before} psg_***{behind} eyJ*** end"


def test_no_error_repeats_a_token_wherever_the_client_put_it():
    answer = answer_for(InvalidParameter(f"unknown query parameter '{TOKEN}'", hint=f"is it {JWT}?"))
    assert TOKEN.encode() not in answer.body
    assert JWT.encode() not in answer.body
