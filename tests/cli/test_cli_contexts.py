"""Contexts: named daemons, precedence, and tokens that stay in their files."""

from __future__ import annotations

import tomllib

import pytest

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.connection import Where, contexts_path, load_contexts, where_of
from plainsong.settings import DEFAULT_URL

A, B, C = "http://a.example:7420", "http://b.example:7420", "http://c.example:7420"
SECRET = "s3cret-token"


def where(environ=None, **given):
    return where_of({"url": None, "namespace": None, "token_file": None, "context": None, **given}, environ or {})


@pytest.fixture
def token(home):
    file = home / "token"
    file.write_text(SECRET + "\n")
    return str(file)


def test_without_settings_the_usual_address_is_used(home):
    assert where() == Where((DEFAULT_URL,), "default", None, context=None)


def test_the_first_context_is_the_current_one_until_another_is_used(alone):
    alone("context", "add", "one", "--url", A, "--namespace", "first", code=0)
    alone("context", "add", "two", "--url", f"{B},{C}", code=0)
    assert where() == Where((A,), "first", None, context="one")
    alone("context", "use", "two", code=0)
    assert where() == Where((B, C), "default", None, context="two")


def test_options_win_over_variables_which_win_over_contexts_and_a_given_context_wins_over_variables(alone, token):
    alone("context", "add", "one", "--url", A, "--namespace", "first", "--token-file", token, code=0)
    alone("context", "add", "two", "--url", B, "--namespace", "second", code=0)
    environ = {"PLAINSONG_URL": C, "PLAINSONG_NAMESPACE": "third"}
    assert where(environ) == Where((C,), "third", None, context=None)
    assert where(environ, context="two") == Where((B,), "second", None, context="two")
    assert where(environ, context="two", namespace="fourth") == Where((B,), "fourth", None, context="two")
    assert where({"PLAINSONG_CONTEXT": "two"}) == Where((B,), "second", None, context="two")
    assert where(environ, url=A) == Where((A,), "third", None, context=None)
    assert where({}, context="one") == Where((A,), "first", token, context="one")


def test_the_token_of_a_context_is_not_sent_to_other_daemons(alone, token):
    alone("context", "add", "one", "--url", A, "--token-file", token, code=0)
    assert where().token_file == token
    assert where(url=B).token_file is None
    assert where({"PLAINSONG_URL": B}).token_file is None
    assert where(url=B, context="one").token_file is None
    assert where(url=B, token_file=token).token_file == token


def test_a_token_is_neither_kept_nor_printed(alone, token):
    said = [
        alone("context", "add", "one", "--url", A, "--token-file", token),
        alone("context", "show"),
        alone("context", "show", "one", "--json"),
        alone("context", "ls"),
        alone("context", "ls", "--json"),
        alone("doctor", "--ready", "--url", "http://127.0.0.1:1", "--token-file", token, "--json"),
        alone("context", "rm", "one"),
    ]
    assert SECRET not in "".join(each.out + each.err for each in said)
    assert token in said[1].out
    assert SECRET not in contexts_path().read_text()


def test_the_file_is_toml_for_its_owner_alone(alone):
    alone("context", "add", "one", "--url", A, "--namespace", "first", code=0)
    assert tomllib.loads(contexts_path().read_text()) == {
        "current": "one",
        "contexts": {"one": {"url": [A], "namespace": "first"}},
    }
    assert contexts_path().stat().st_mode & 0o077 == 0
    assert [path.name for path in contexts_path().parent.iterdir()] == ["contexts.toml"]


def test_contexts_are_listed_shown_and_forgotten(alone):
    alone("context", "add", "one", "--url", A)
    alone("context", "add", "two", "--url", B, "--use")
    assert [line.split()[:2] for line in alone("context", "ls").lines[1:]] == [["one", "default"], ["*", "two"]]
    assert alone("context", "ls", "--json").json[1] == {
        "name": "two",
        "current": True,
        "url": [B],
        "namespace": None,
        "tokenFile": None,
        "caFile": None,
        "certificate": None,
        "key": None,
    }
    alone("context", "rm", "two", code=0)
    assert load_contexts().current is None
    assert alone("context", "show").code == Exit.NOT_FOUND
    assert "context add" in alone("context", "show").err


def test_an_unknown_context_names_the_nearest(alone):
    alone("context", "add", "production", "--url", A)
    said = alone("stats", "--context", "prodution", code=Exit.NOT_FOUND)
    assert said.err == "error: there is no context 'prodution'\nhint: did you mean 'production'?\n"


def test_an_existing_context_is_replaced_only_on_request(alone):
    alone("context", "add", "one", "--url", A)
    assert "--force" in alone("context", "add", "one", "--url", B, code=Exit.FAILED).err
    alone("context", "add", "one", "--url", B, "--force", code=0)
    assert where().urls == (B,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bad name", "--url", A), "invalid context name 'bad name'"),
        (("one", "--url", "ftp://a"), "'ftp://a' is not the URL of a daemon"),
        (("one", "--url", A, "--namespace", "a-b"), "namespace 'a-b' is not allowed"),
        (("one", "--url", A, "--token-file", "/does/not/exist"), "the token file cannot be read"),
    ],
)
def test_an_invalid_context_is_not_kept(alone, arguments, says):
    said = alone("context", "add", *arguments, code=Exit.USAGE)
    assert says in said.err
    assert not contexts_path().exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("current = 5", "current must be a name"),
        ("currant = 'x'", "unknown key 'currant'"),
        ("current = 'x'", "current names no context"),
        ("[contexts.a]\nurl = 5", "contexts.a.url must be a URL"),
        ("[contexts.a]\nurl = 'http://a'\nuri = 'x'", "did you mean 'url'"),
        ("[contexts.a]\nurl = 'http://a'\nnamespace = 5", "must be strings"),
        ("[contexts", "Expected"),
    ],
)
def test_a_malformed_file_is_reported_with_the_place(home, text, says):
    contexts_path().parent.mkdir(parents=True)
    contexts_path().write_text(text)
    with pytest.raises(CommandFailed, match=r"contexts\.toml") as caught:
        load_contexts()
    assert says in caught.value.message
    assert caught.value.code == Exit.USAGE
