"""All settings together: precedence, unknown keys, and that every problem is reported at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.config import Config, ConfigError, every_setting, load_config
from broker.config.config import config_of

MIB = 1 << 20


def refused(file=None, environ=None, flags=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ or {}, flags or {})
    return [str(problem) for problem in caught.value.problems]


def toml(tmp_path, text: str) -> Path:
    file = tmp_path / "plainsong.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_without_settings_everything_is_at_its_default():
    loaded = load_config(None, {}, {})
    assert loaded.config == Config()
    assert set(loaded.origins) == set(every_setting())
    assert set(loaded.origins.values()) == {"default"}


def test_defaults_match_the_contract():
    config = Config()
    assert config.http.bind == "127.0.0.1:7420"
    assert config.http.max_body_bytes == 64 * MIB
    assert config.http.keep_alive_s == 75
    assert config.topic.default_ttl_s == 7 * 86_400
    assert config.topic.max_message_bytes == 8 * MIB
    assert config.poll.max_messages == 100_000
    assert config.poll.max_bytes == 16 * MIB
    assert config.poll.max_wait_ms == 60_000
    assert config.retention.interval_s == 60
    assert config.transactions.max_lifetime_s == 25 * 3600
    assert config.http.flat_topic_properties is False


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path):
    file = toml(
        tmp_path,
        '[http]\nbind = "127.0.0.1:1"\nflat_topic_properties = false\nmax_body_bytes = "32 MiB"\n[log]\nlevel="debug"\n',
    )
    environ = {"PLAINSONG_HTTP__BIND": "127.0.0.1:2", "PLAINSONG_HTTP__FLAT_TOPIC_PROPERTIES": "yes"}
    loaded = load_config(file, environ, {"http.bind": "127.0.0.1:3"})
    assert loaded.config.http.bind == "127.0.0.1:3"
    assert loaded.config.http.flat_topic_properties is True
    assert loaded.config.http.max_body_bytes == 32 * MIB
    assert loaded.origins["http.bind"] == "flag"
    assert loaded.origins["http.flat_topic_properties"] == "environment PLAINSONG_HTTP__FLAT_TOPIC_PROPERTIES"
    assert loaded.origins["log.level"] == f"file {file}"
    assert loaded.origins["http.keep_alive_s"] == "default"


@pytest.mark.parametrize(("section", "key"), [("http", "lane"), ("storage", "compression")])
def test_a_retired_setting_is_accepted_with_a_warning(tmp_path, section, key):
    file = toml(tmp_path, f'[{section}]\n{key} = "none"\n')
    variable = f"PLAINSONG_{section}__{key}".upper()
    loaded = load_config(file, {variable: "perhaps"}, {})
    assert [warning.partition(" (")[0] for warning in loaded.warnings] == [
        f"file {file}: {section}.{key} has no effect any more",
        f"environment {variable}: {section}.{key} has no effect any more",
    ]
    assert f"{section}.{key}" not in loaded.origins


@pytest.mark.parametrize(
    ("environ", "bind"),
    [
        ({"PORT": "8080"}, "127.0.0.1:8080"),
        ({"PORT": "8080", "PLAINSONG_HTTP__BIND": "0.0.0.0:1"}, "0.0.0.0:8080"),
        ({"PORT": "8080", "PLAINSONG_HTTP__BIND": "[::1]:1"}, "[::1]:8080"),
        ({"PORT": ""}, "127.0.0.1:7420"),
        ({"PORT": "8080", "PLAINSONG_HTTP__BIND": "unix:/a, [::1]:1, 127.0.0.1:2"}, "unix:/a,[::1]:8080,127.0.0.1:2"),
    ],
)
def test_port_replaces_the_port_and_nothing_else(environ, bind):
    assert load_config(None, environ, {}).config.http.bind == bind


def test_port_yields_to_a_flag():
    loaded = load_config(None, {"PORT": "8080"}, {"http.bind": "localhost:0"})
    assert loaded.config.http.bind == "localhost:0"
    assert loaded.origins["http.bind"] == "flag"


def test_port_needs_a_port_to_replace():
    assert refused(environ={"PORT": "1", "PLAINSONG_HTTP__BIND": "unix:/a"}) == [
        "environment PORT: http.bind has no port, only Unix sockets"
    ]


@pytest.mark.parametrize("port", ["http", "65536", "-1"])
def test_an_invalid_port_is_refused_by_its_name(port):
    assert refused(environ={"PORT": port})[0].startswith("environment PORT: http.bind:")


def test_other_plainsong_variables_are_not_settings_of_the_daemon():
    environ = {"PLAINSONG_URL": "http://elsewhere", "PLAINSONG_TOKEN": "x", "PATH": "/bin", "HTTP__BIND": "x"}
    assert load_config(None, environ, {}).config == Config()


def test_unknown_names_are_refused_with_the_nearest_known_one(tmp_path):
    assert refused(environ={"PLAINSONG_HTTP__BNID": "x"}) == [
        "environment PLAINSONG_HTTP__BNID: unknown setting 'http.bnid' (did you mean 'http.bind'?)"
    ]
    assert "did you mean 'topic.max_message_bytes'?" in refused(flags={"http.max_message_bytes": "1"})[0]
    assert "did you mean 'storage'?" in refused(toml(tmp_path, "[stroage]\nkind='memory'\n"))[0]


def test_a_value_in_the_place_of_a_section_is_refused(tmp_path):
    assert "'http' is a section (write [http]" in refused(toml(tmp_path, "http = 5\n"))[0]


def test_all_problems_are_reported_at_once(tmp_path):
    file = toml(tmp_path, '[topic]\nidle_s = "300"\nidle = 1\n[poll]\nmax_messages = 0\n')
    problems = refused(file, {"PLAINSONG_LOG__FORMAT": "xml", "PORT": "x"}, {"cache.max_bytes": "1 MB"})
    assert len(problems) == 6
    assert f"file {file}: topic.idle_s: '300' is not a number of seconds" in problems


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[http\n", "is not TOML: .*line 1"),
        (b"a = '\xff'", r"is not UTF-8 text \(byte 5\)"),
        (b"x = " + b"9" * 5000, "is not TOML"),
    ],
)
def test_a_malformed_file_is_reported_with_the_place(tmp_path, content, says):
    file = tmp_path / "x.toml"
    file.write_bytes(content)
    assert re.search(says, refused(file)[0])


def test_a_missing_file_is_an_error_and_not_a_default(tmp_path):
    assert refused(tmp_path / "absent.toml")[0].endswith("the file does not exist")
    assert "cannot be read" in refused(tmp_path)[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"http.max_inflight_bytes": "127 MiB"},
            'http.max_inflight_bytes = "127 MiB" is less than 2 times http.max_body_bytes',
        ),
        ({"topic.mailbox_bytes": "1 MiB"}, "would not fit into any mailbox"),
        ({"topic.max_message_bytes": "65 MiB"}, "would not fit into any body"),
        ({"transactions.timeout_s": "3601"}, "the default time-out would not be allowed"),
        ({"deduplication.max_retention_s": "604799"}, "the default retention would not be allowed"),
        ({"deduplication.max_producers": "999"}, "is less than deduplication.max_long_producers = 1000"),
        ({"transactions.service": "tephra"}, "without transactions.tephra (set its address)"),
        (
            {"transactions.tephra": "tephra:15165"},
            'transactions.tephra = "tephra:15165" needs transactions.service = "tephra"',
        ),
        (
            {"transactions.service": "off", "transactions.thrift": "127.0.0.1:15165"},
            'transactions.thrift = "127.0.0.1:15165" needs transactions.service = "embedded"',
        ),
    ],
)
def test_values_that_cannot_work_together_are_refused(flags, says):
    assert says in refused(flags=flags)[0]


def test_a_tephra_is_configured_by_its_address():
    flags = {"transactions.service": "tephra", "transactions.tephra": "tephra:15165"}
    assert load_config(None, {}, flags).config.transactions.tephra == "tephra:15165"


def test_an_optional_address_is_empty_or_an_address():
    assert load_config(None, {}, {"transactions.thrift": " "}).config.transactions.thrift == ""
    assert "is not an address" in refused(flags={"transactions.thrift": "15165"})[0]


def test_a_smaller_body_limit_requires_a_smaller_message_limit():
    with pytest.raises(ConfigError):
        load_config(None, {}, {"http.max_body_bytes": "1 MiB"})
    load_config(None, {}, {"http.max_body_bytes": "1 MiB", "topic.max_message_bytes": "1 MiB"})


def test_every_variable_sets_its_setting():
    for name, setting in every_setting().items():
        variable = f"PLAINSONG_{name}".replace(".", "__").upper()
        loaded = load_config(None, {variable: str(setting.default)}, {})
        assert loaded.origins[name] == f"environment {variable}"
        assert loaded.config == Config()


def test_values_by_name_make_the_same_configuration():
    assert config_of({name: setting.default for name, setting in every_setting().items()}) == Config()


def test_an_unknown_name_of_a_value_is_refused():
    with pytest.raises(ValueError, match=r"unknown settings: http\.bnid, stroage\.kind"):
        config_of({"stroage.kind": "memory", "http.bnid": "127.0.0.1:0", "storage.kind": "memory"})


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(AttributeError):
        Config().http.bind = "0.0.0.0:1"  # type: ignore[misc]


def test_a_nested_section_is_read_from_all_sources(tmp_path):
    file = toml(
        tmp_path, '[storage]\nkind = "hbase"\n[storage.hbase]\nthrift = "a:1"\ntimeout_s = 5\nmax_connections=3\n'
    )
    environ = {"PLAINSONG_STORAGE__HBASE__THRIFT": "b:2, [::1]:3", "PLAINSONG_STORAGE__HBASE__CREATE_TABLES": "no"}
    loaded = load_config(file, environ, {"storage.hbase.timeout_s": "7"})
    hbase = loaded.config.storage.hbase
    assert (hbase.thrift, hbase.timeout_s, hbase.max_connections, hbase.create_tables) == ("b:2,[::1]:3", 7, 3, False)
    assert loaded.origins["storage.hbase.thrift"] == "environment PLAINSONG_STORAGE__HBASE__THRIFT"
    assert loaded.config.value("storage.hbase.timeout_s") == 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[storage.hbsae]\nthrift = 'a:1'", "unknown section [storage.hbsae]"),
        ("[storage]\nhbase = 'a:1'", "'storage.hbase' is a section"),
        ("[storage.hbase]\nthrif = 'a:1'", "unknown setting 'storage.hbase.thrif'"),
        ("[storage.hbase]\nthrift = 'a:1,,b:2'", "storage.hbase.thrift: '' is not an address"),
        ("[storage.hbase]\nthrift = ''", "storage.hbase.thrift: '' is not an address"),
        ("[storage.hbase]\ntable_prefix = 'a b'", "storage.hbase.table_prefix: 'a b' is not letters"),
    ],
)
def test_errors_in_a_nested_section_are_reported(tmp_path, text, told):
    assert told in refused(toml(tmp_path, text))[0]


def test_file_names_in_a_settings_file_are_relative_to_its_folder(tmp_path):
    text = """
[storage]
data_dir = "data"
[tls]
certificate = "tls.pem"
key = "/etc/tls.key"
[security]
tokens_file = "names/tokens.json"
[security.oidc]
issuer = "https://login.example"
audience = "a"
jwks = "https://login.example/keys"
"""
    config = load_config(toml(tmp_path, text), {}, {}).config
    assert config.tls.certificate == str(tmp_path / "tls.pem")
    assert config.tls.key == "/etc/tls.key"
    assert config.security.tokens_file == str(tmp_path / "names/tokens.json")
    assert config.security.grants_file == ""
    assert config.security.oidc.jwks == "https://login.example/keys"
    # The default store must not move: an empty one would be created in the new place.
    assert config.storage.data_dir == Path("data")


def test_file_names_in_the_environment_and_flags_are_relative_to_the_working_directory(tmp_path):
    file = toml(tmp_path, '[security]\ntokens_file = "tokens.json"\n')
    config = load_config(file, {"PLAINSONG_SECURITY__GRANTS_FILE": "g"}, {"security.tokens_file": "t"}).config
    assert (config.security.tokens_file, config.security.grants_file) == ("t", "g")


def test_every_setting_that_names_a_file_is_a_path():
    names = {name for name, setting in every_setting().items() if setting.meaning.is_file}
    assert {name for name in every_setting() if name.endswith("_file")} <= names
    assert {"tls.certificate", "tls.key", "tls.client_ca", "security.oidc.jwks", "cluster.zookeeper_ca"} <= names
