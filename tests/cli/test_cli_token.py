"""`plainsong token` and `plainsong grants`: they edit the files, never show a hash, and show a token only once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.security.tokens import fault_of, hash_of, parse_tokens
from plainsong.cli.command import Exit

GRANTS = """format = 1
[groups]
payments = ["billing"]

[[grant]]
to = ["group:payments"]
verbs = ["publish"]
on = ["shop:*"]

[[grant]]
to = ["oidc-group:ops"]
verbs = ["all"]
on = ["service"]
"""


def made(alone, *more, name="billing", expires="90d"):
    said = alone("token", "create", "--file", "tokens.json", "--name", name, "--expires", expires, *more, code=0)
    return said.out.strip()


def listed(alone):
    return alone("token", "list", "--file", "tokens.json", "--json", code=0).json


def test_a_token_is_shown_once_alone_on_standard_output(alone, home):
    token = made(alone)
    assert fault_of(token) is None
    path = home / "tokens.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert token not in path.read_text()
    assert parse_tokens(path.read_bytes()).find(token).name == "billing"
    shown = alone("token", "list", "--file", "tokens.json", code=0).out
    assert "billing" in shown
    assert "active" in shown
    assert "sha256" not in shown
    assert "sha256" not in json.dumps(listed(alone))


def test_a_token_can_go_to_a_new_file_of_its_owner(alone, home):
    said = alone(
        "token", "create", "--file", "tokens.json", "--name", "b", "--expires", "never", "--write-to", "b.token"
    )
    assert "psg_" not in said.out + said.err
    token = (home / "b.token").read_text().strip()
    assert (home / "b.token").stat().st_mode & 0o777 == 0o600
    again = alone(
        "token", "create", "--file", "tokens.json", "--name", "b", "--expires", "never", "--write-to", "b.token"
    )
    assert again.code == Exit.USAGE
    assert (home / "b.token").read_text().strip() == token
    assert len(listed(alone)) == 1


@pytest.mark.parametrize("expires", ["398d", "1999-01-01", "soon", "2199-01-01", "-1d"])
def test_an_expiry_that_is_past_too_far_away_or_invalid_is_refused(alone, home, expires):
    said = alone("token", "create", "--file", "tokens.json", "--name", "b", f"--expires={expires}", code=Exit.USAGE)
    assert said.out == ""
    assert not (home / "tokens.json").exists()


def test_an_expiry_is_required(alone):
    assert "--expires" in alone("token", "create", "--file", "tokens.json", "--name", "b", code=Exit.USAGE).err


@pytest.mark.parametrize("name", ["anonymous", "oidc:ann", "a b", ""])
def test_a_reserved_or_invalid_name_is_refused(alone, name):
    alone("token", "create", "--file", "tokens.json", "--name", name, "--expires", "1d", code=Exit.USAGE)


def test_one_token_is_revoked_by_id_or_all_tokens_of_a_name(alone):
    for name in ("a", "b", "b"):
        made(alone, name=name)
    first = listed(alone)[0]["id"]
    assert alone("token", "revoke", first, "--file", "tokens.json", "--yes", code=0).out == "1 token revoked\n"
    assert [each["state"] for each in listed(alone)] == ["revoked", "active", "active"]
    said = alone("token", "revoke", "--name", "b", "--file", "tokens.json", "--yes", "--json", code=0)
    assert said.json == {"revoked": [each["id"] for each in listed(alone)[1:]]}
    assert {each["state"] for each in listed(alone)} == {"revoked"}
    alone("token", "revoke", "000000000000", "--file", "tokens.json", "--yes", code=Exit.NOT_FOUND)
    alone("token", "revoke", "--file", "tokens.json", "--yes", code=Exit.USAGE)
    assert alone("token", "prune", "--file", "tokens.json", code=0).out == "3 tokens removed, 0 left\n"
    assert listed(alone) == []


def test_a_rotated_token_ends_after_the_overlap(alone):
    old = made(alone)
    (before,) = listed(alone)
    new = alone("token", "rotate", before["id"], "--overlap", "0s", "--file", "tokens.json", code=0).out.strip()
    assert fault_of(new) is None
    after, other = listed(alone)
    assert (after["id"], after["state"], other["name"], other["state"]) == (
        before["id"],
        "expired",
        "billing",
        "active",
    )
    again = alone("token", "rotate", before["id"], "--file", "tokens.json")
    assert again.code == Exit.FAILED
    kept = alone("token", "rotate", other["id"], "--file", "tokens.json", code=0).out.strip()
    assert kept not in (old, new)
    assert [each["state"] for each in listed(alone)] == ["expired", "active", "active"]


def test_a_token_is_checked_for_its_form_and_against_its_file(alone, home):
    token = made(alone)
    (home / "good").write_text(token + "\n")
    (home / "bad").write_text(token[:-1] + ("0" if token[-1] != "0" else "1"))
    good = alone("token", "check", "good", "--file", "tokens.json", "--json", code=0).json
    assert (good["valid"], good["state"], good["name"]) == (True, "active", "billing")
    assert alone("token", "check", "good", code=0).out.endswith("well-formed\n")
    said = alone("token", "check", "bad", "--file", "tokens.json", code=1)
    assert "checksum" in said.out
    assert token[:20] not in said.out
    alone("token", "revoke", good["id"], "--file", "tokens.json", "--yes", code=0)
    assert alone("token", "check", "good", "--file", "tokens.json", "--json", code=1).json["state"] == "revoked"


def test_the_file_is_the_one_named_by_the_settings(alone, home):
    (home / "plainsong.toml").write_text('[security]\ntokens_file = "here.json"\n')
    alone("token", "create", "--config", "plainsong.toml", "--name", "b", "--expires", "1d", code=0)
    assert (home / "here.json").exists()
    assert "--file" in alone("token", "list", code=Exit.USAGE).err


def test_a_file_that_others_can_write_is_left_alone(alone, home):
    made(alone)
    (home / "tokens.json").chmod(0o666)
    before = (home / "tokens.json").read_bytes()
    for words in (
        ("list",),
        ("create", "--name", "b", "--expires", "1d"),
        ("prune",),
        ("revoke", "--name", "b", "--yes"),
    ):
        said = alone("token", *words, "--file", "tokens.json", code=Exit.USAGE)
        assert "can be written by" in said.err
    assert (home / "tokens.json").read_bytes() == before


def test_a_file_of_another_format_is_left_alone(alone, home):
    (home / "tokens.json").write_text('{"format": 2, "tokens": []}')
    alone("token", "create", "--file", "tokens.json", "--name", "b", "--expires", "1d", code=Exit.USAGE)
    assert (home / "tokens.json").read_text() == '{"format": 2, "tokens": []}'


def test_tokens_created_concurrently_are_all_kept(alone, home, spawn_alone):
    made(alone)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(spawn_alone, range(4))) == [0] * 4
    assert {each["name"] for each in listed(alone)} == {"billing", "n0", "n1", "n2", "n3"}


@pytest.fixture
def spawn_alone(home):
    import subprocess

    from tests.daemon.harness import PLAINSONG, clean_environ

    def create(number: int) -> int:
        command = [PLAINSONG, "token", "create", "--file", "tokens.json", "--name", f"n{number}", "--expires", "1d"]
        return subprocess.run(command, cwd=home, env=clean_environ(), capture_output=True, check=False).returncode

    return create


def test_the_file_has_the_hash_of_the_created_token(alone, home):
    token = made(alone)
    assert hash_of(token) in (home / "tokens.json").read_text()


# --- grants ----------------------------------------------------------------------------------------


@pytest.fixture
def grants(home):
    (home / "grants.toml").write_text(GRANTS)
    return "grants.toml"


def test_grants_are_checked_and_the_line_that_grants_is_named(alone, grants):
    said = alone("grants", "check", "--file", grants, "--as", "billing", "publish", "shop:orders", code=0)
    assert said.out == "yes: grants.toml, line 5\n"
    alone("grants", "check", "--file", grants, "--as", "billing", "publish", "shop:*", code=0)
    alone("grants", "check", "--file", grants, "--as", "billing", "poll", "shop:orders", code=1)
    alone("grants", "check", "--file", grants, "--as", "billing", "publish", "service", code=1)
    alone("grants", "check", "--file", grants, "--as", "oidc:x", "operate", "service", code=1)
    said = alone(
        "grants", "check", "--file", grants, "--as", "oidc:x", "--group", "ops", "operate", "service", "--json"
    )
    assert said.json == {"granted": True, "line": 10}
    alone("grants", "check", "--file", grants, "--as", "x", "publish", "shop", code=Exit.USAGE)


def test_grants_are_listed_all_or_those_of_a_name(alone, grants):
    assert len(alone("grants", "list", "--file", grants, "--json", code=0).json) == 2
    assert alone("grants", "list", "--file", grants, "--as", "billing", "--json", code=0).json == [
        {"to": ["group:payments"], "verbs": ["publish"], "on": ["shop:*"], "line": 5}
    ]
    assert "shop:*" in alone("grants", "list", "--file", grants, code=0).out


def test_a_file_is_validated_and_its_fault_is_named_with_its_place(alone, home, grants):
    assert alone("grants", "validate", grants, code=0).out == "valid: 2 grants, 1 group, 0 quotas\n"
    (home / "bad.toml").write_text(GRANTS.replace('"publish"', '"write"'))
    said = alone("grants", "validate", "bad.toml", code=Exit.USAGE)
    assert "bad.toml, line 7, column 10: unknown verb 'write'" in said.err
    assert "none.toml" in alone("grants", "validate", "none.toml", code=Exit.USAGE).err


def test_an_unknown_setting_is_refused_even_with_a_file(alone, home):
    said = alone("token", "create", "--file", "tokens.json", "--name", "n", "--expires", "1d", "--set", "x=y")
    assert said.code == Exit.USAGE
    assert "x" in said.err
    assert not (home / "tokens.json").exists()
