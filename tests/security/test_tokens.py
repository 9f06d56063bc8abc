"""Our own tokens: their format, and the file of their hashes."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.security.tokens import (
    BadTokensFile,
    TokenEntry,
    TokenTable,
    checksum,
    fault_of,
    format_tokens,
    hash_of,
    id_of,
    is_name,
    new_token,
    parse_tokens,
    pruned,
    revoked,
)

TOKEN = "psg_PlainsongPlainsongPlainsongPlainsong00001Kckda"
HASH = "sha256:c4b85a8b6a3cbb0043653785ba997f49ff88b11f665d46d19439471a30066d97"
NOW_MS = 1_800_000_000_000
ENTRY = {
    "id": "c4b85a8b6a3c",
    "name": "billing",
    "hash": HASH,
    "created": "2026-11-22T05:55:14Z",
    "expires": None,
    "revoked": None,
    "note": "",
}


def file_of(*entries, **more):
    return json.dumps({"format": 1, "tokens": list(entries), **more}).encode()


def test_the_published_token_has_the_published_hash_and_id():
    assert fault_of(TOKEN) is None
    assert hash_of(TOKEN) == HASH
    assert id_of(HASH) == "c4b85a8b6a3c"


def test_a_new_token_is_well_formed_and_takes_each_character_from_the_source():
    source = random.Random(7)
    made = new_token(source.choice)
    assert len(made) == 50
    assert fault_of(made) is None
    assert new_token(source.choice) != made


@given(st.integers(0, 49), st.sampled_from("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))
def test_a_token_with_one_wrong_character_is_invalid(at, character):
    wrong = TOKEN[:at] + character + TOKEN[at + 1 :]
    assert (fault_of(wrong) is None) is (wrong == TOKEN)


def test_a_short_checksum_is_padded_with_zeros():
    assert checksum("psg_") != ""
    assert all(len(checksum(f"psg_{number}")) == 6 for number in range(1000))
    assert any(checksum(f"psg_{number}").startswith("0") for number in range(1000))


@pytest.mark.parametrize("name", ["billing", "a.b@c/d+e=f-g_H", "x" * 255])
def test_a_token_may_be_for_any_name_without_a_colon(name):
    assert is_name(name, of_token=True)
    assert is_name(f"oidc:{name[:250]}")
    assert not is_name(f"oidc:{name[:250]}", of_token=True)


@pytest.mark.parametrize("name", ["", "x" * 256, "anonymous", "a b", "é", "a\n", "*"])
def test_an_invalid_name_is_refused(name):
    assert not is_name(name)
    with pytest.raises(BadTokensFile, match="name"):
        parse_tokens(file_of({**ENTRY, "name": name}))


def test_a_file_round_trips():
    entries = [
        TokenEntry(id_of(HASH), "billing", HASH, NOW_MS, None, None, "for é"),
        TokenEntry("0" * 12, "billing", "sha256:" + "0" * 64, NOW_MS + 1, NOW_MS + 5_000, NOW_MS + 7),
    ]
    assert parse_tokens(format_tokens(entries)).entries == tuple(entries)
    assert parse_tokens(file_of(ENTRY)).find(TOKEN) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"format": 2, "tokens": []}',
        b'{"format": true, "tokens": []}',
        b'{"format": 1}',
        b'{"format": 1, "tokens": {}}',
        b'{"format": 1, "tokens": [], "more": 1}',
        b'{"format": 1, "tokens": [' + b"[" * 100_000,
        file_of({**ENTRY, "more": 1}),
        file_of({**ENTRY, "id": "000000000000"}),
        file_of({**ENTRY, "hash": "sha256:" + "g" * 64}),
        file_of({**ENTRY, "hash": HASH.upper()}),
        file_of({**ENTRY, "created": None}),
        file_of({**ENTRY, "expires": "tomorrow"}),
        file_of({**ENTRY, "expires": "2026-13-01T00:00:00Z"}),
        file_of({**ENTRY, "revoked": 17}),
        file_of({**ENTRY, "note": "x" * 1_001}),
        file_of(ENTRY, ENTRY),
        file_of("billing"),
    ],
)
def test_a_file_with_one_fault_is_refused_as_a_whole(data):
    with pytest.raises(BadTokensFile):
        parse_tokens(data)


@given(
    st.binary(max_size=300)
    | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_any_bytes_are_read_or_refused(data):
    try:
        table = parse_tokens(data)
    except BadTokensFile:
        return
    assert isinstance(table, TokenTable)


JSON_VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(st.integers(), max_size=2)


@given(st.sampled_from(sorted(ENTRY)), JSON_VALUES)
def test_any_value_of_a_field_is_read_or_refused(key, value):
    try:
        parse_tokens(file_of({**ENTRY, key: value}))
    except BadTokensFile as error:
        assert "token 1" in str(error)


def test_a_revoked_token_stays_revoked_and_an_expired_one_expired():
    active = TokenEntry("a", "n", "h1", 0, NOW_MS + 10)
    ended = TokenEntry("b", "n", "h2", 0, NOW_MS)
    gone = TokenEntry("c", "n", "h3", 0, None, NOW_MS - 5)
    assert [each.state(NOW_MS) for each in (active, ended, gone)] == ["active", "expired", "revoked"]
    assert pruned([active, ended, gone], NOW_MS) == [active]
    after = revoked([active, ended, gone], lambda entry: True, NOW_MS)
    assert [each.revoked_ms for each in after] == [NOW_MS, NOW_MS, NOW_MS - 5]
