"""The three published wheels, each installed into an environment with exactly its requirements."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from plainsong import Client, __version__
from plainsong.cli.command import Exit
from plainsong.cli.context import SHELLS
from plainsong.cli.main import VERBS
from scripts import dist
from scripts.manpages import COMPLETIONS
from tests.daemon.harness import ROOT, Daemon
from tests.dist.environments import environment, metadata_of, required, run
from tests.patience import PATIENCE_S
from tests.spark.installed import environ_of

FOLDERS = {
    "client": ("plainsong",),
    "server": ("actors", "broker", "storage"),
    "spark": ("pyspark_plainsong",),
}


@pytest.fixture(scope="session")
def client_only(wheels, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("client") / "env", [wheels["client"]])


@pytest.fixture(scope="session")
def with_server(wheels, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("server") / "env", [wheels["client"], wheels["server"]])


@pytest.fixture(scope="session")
def with_spark(wheels, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("spark") / "env", [wheels["client"], wheels["spark"]])


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield "http://{}:{}".format(*daemon.address)


# --- the wheels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", dist.KINDS)
def test_a_wheel_has_every_file_of_its_folders_and_no_others(kind, wheels):
    tracked = subprocess.run(
        ["git", "ls-files", *FOLDERS[kind]], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS[kind]
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert set(tracked) <= sources
    share = ROOT / f"etc/dist/{kind}"
    data = f"plainsong_{kind}-{__version__}.data/data"
    sources |= {f"{data}/{path.relative_to(share)}" for path in share.glob("share/**/*") if path.is_file()}
    with zipfile.ZipFile(wheels[kind]) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert {f"{folder}/py.typed" for folder in FOLDERS[kind]} <= names


@pytest.mark.parametrize("kind", dist.KINDS)
def test_the_metadata_is_complete(kind, wheels):
    metadata = metadata_of(wheels[kind])
    assert (metadata["Name"], metadata["Version"]) == (f"plainsong-{kind}", __version__)
    assert metadata["Summary"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith(f"# plainsong-{kind}\n")
    labels = {each.partition(",")[0] for each in metadata.get_all("Project-URL")}
    assert {"Homepage", "Documentation", "Source", "Changelog"} <= labels
    assert "Typing :: Typed" in metadata.get_all("Classifier")


@pytest.mark.parametrize("kind", dist.KINDS)
def test_building_twice_makes_equal_bytes(kind, wheels, tmp_path):
    assert dist.build(kind, tmp_path).read_bytes() == wheels[kind].read_bytes()


@pytest.mark.parametrize("kind", dist.KINDS)
def test_the_contents_of_a_wheel_pass_all_checks(kind, wheels):
    pytest.importorskip("check_wheel_contents", reason="NOT TESTED: check-wheel-contents is not installed here")
    judged = dist.check(kind, wheels[kind])
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.parametrize("kind", dist.KINDS)
def test_a_wheel_has_a_bill_of_materials_that_is_valid_complete_and_the_same_twice(kind, wheels, tmp_path):
    pytest.importorskip("cyclonedx", reason="NOT TESTED: cyclonedx-python-lib is not installed here")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    from scripts import sbom

    wheel = Path(shutil.copy(wheels[kind], tmp_path))
    text = sbom.write(wheel, dist.built_s()).read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert bill["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    named = {each["name"]: each["version"] for each in bill["components"]}
    needed = {name: found.version for name, found in required(wheel).items()}
    assert named.items() >= needed.items()
    ours = {name for name in named if name.startswith("plainsong-")}
    assert ours == (set() if kind == "client" else {"plainsong-client"})
    if ours:  # and the client's requirements
        assert named.keys() - ours == needed.keys() | required(wheels["client"]).keys()
    assert {each["ref"] for each in bill["dependencies"]} == {f"plainsong-{kind}", *named}
    assert sbom.write(wheel, dist.built_s()).read_text(encoding="utf-8") == text


def test_programs_and_commands_are_installed_where_they_are_expected(wheels):
    found = {}
    for kind, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/entry_points.txt"))
            points = ConfigParser()
            points.read_string(archive.read(name).decode())
        found[kind] = {
            section: dict(points[section]) for section in ("console_scripts", "plainsong.commands") if section in points
        }
    main = "plainsong.cli.start:main"
    assert found["client"] == {"console_scripts": {"plainsong": main}}
    assert found["server"]["console_scripts"] == {"plainsong-server": main}
    verbs = {"serve", "config", "store", "copy", "backup", "maintain", "replica", "token", "grants"}
    assert set(found["server"]["plainsong.commands"]) == verbs
    assert found["spark"] == {"plainsong.commands": {"pipeline": "pyspark_plainsong.pipeline.command:pipeline"}}


def test_the_distributions_ask_for_no_more_and_no_less_than_the_tree():
    """The tree's own pyproject.toml is for development; a dependency in one must be in the other."""
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = {
        kind: tomllib.loads((ROOT / f"etc/dist/{kind}/pyproject.toml").read_text(encoding="utf-8"))
        for kind in dist.KINDS
    }
    wanted = {
        each
        for kind in ("client", "server")
        for each in (
            *ours[kind]["project"]["dependencies"],
            *ours[kind]["project"]["optional-dependencies"].get("hbase", []),
        )
    }
    assert wanted - {f"plainsong-client=={__version__}"} == set(tree["dependencies"])
    spark = ours["spark"]["project"]
    extra = {*spark["dependencies"], *spark["optional-dependencies"]["report"]}
    assert extra - {f"plainsong-client=={__version__}", *wanted} == set(tree["optional-dependencies"]["spark"])
    assert spark["optional-dependencies"]["hbase"] == [f"plainsong-server[hbase]=={__version__}"]


def test_nothing_asks_an_index_for_a_distribution_called_plainsong():
    """That name belongs to another project."""
    texts = [
        ROOT / name
        for name in subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        if not name.endswith(".lock")
    ]
    asked = re.compile(
        r"(?:pip|pipx|uv tool) install[^\n]*?[\s'\"]plainsong(?![-_\w/])|plainsong\[(?:spark|sql|report)\]"
    )
    found = {
        path.relative_to(ROOT).as_posix(): match[0]
        for path in texts
        if path.is_file() and path != Path(__file__)
        for match in [asked.search(path.read_bytes().decode("utf-8", "replace"))]
        if match
    }
    assert found == {}


# --- the client --------------------------------------------------------------------------------------


def test_the_client_pulls_at_most_fifteen_packages(wheels):
    assert len(required(wheels["client"])) < 15, sorted(required(wheels["client"]))


def test_the_client_works_next_to_modules_of_a_program_with_any_of_our_other_names(client_only, url, tmp_path):
    (tmp_path / "protocol.py").write_text("mine = True\n")
    for name in ("storage", "pipeline", "broker", "actors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    (tmp_path / "program.py").write_text(
        "import sys, protocol, storage, pipeline, broker, actors\n"
        "assert all(each.mine for each in (protocol, storage, pipeline, broker, actors))\n"
        "import anyio\n"
        "from plainsong import AsyncClient, Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    client.create_topic('beside')\n"
        "    with client.transaction():\n"
        "        client.publish('beside', [b'one', b'two'])\n"
        "    print([message.payload for message in client.read('beside')])\n"
        "async def main():\n"
        "    async with AsyncClient(sys.argv[1]) as client:\n"
        "        print([message.payload async for message in client.read('beside')])\n"
        "anyio.run(main)\n"
    )
    done = run(client_only, "python", "program.py", url, cwd=tmp_path)
    assert done.stdout == "[b'one', b'two']\n" * 2


def test_the_client_alone_has_the_command_line(client_only, url):
    run(client_only, "plainsong", "topic", "create", "alone", "--url", url)
    run(client_only, "plainsong", "publish", "alone", "hello", "--url", url)
    assert run(client_only, "plainsong", "poll", "alone", "--url", url).stdout == "hello\n"
    assert run(client_only, "python", "-m", "plainsong", "--version").stdout == f"plainsong {__version__}\n"


WHEELS = "(its wheel is next to this one's; `make dist` builds it)"


def test_a_verb_of_a_distribution_that_is_not_installed_says_so_and_what_to_install(client_only):
    listed = run(client_only, "plainsong", "--help").stdout
    for name in ("serve", "config", "store", "copy", "backup", "maintain", "pipeline"):
        assert re.search(rf"^  {name} +\(not installed\)$", listed, re.MULTILINE)
    said = run(client_only, "plainsong", "serve", "--data-dir", "x", code=Exit.USAGE).stderr
    assert said == f"error: the daemon is not installed here\nhint: pip install plainsong-server {WHEELS}\n"
    said = run(client_only, "plainsong", "pipeline", "list", code=Exit.USAGE).stderr
    assert said == f"error: the pipeline is not installed here\nhint: pip install plainsong-spark {WHEELS}\n"


# --- the manual and the shells -----------------------------------------------------------------------

#: Commands that ask each shell for completions, with the installed script as $1; in zsh, its own functions print them.
ASKED = {
    "bash": 'source "$1"; COMP_WORDS=(plainsong pu); COMP_CWORD=1; _plainsong_completion plainsong; printf "%s\\n" $COMPREPLY',
    "zsh": "compdef() { : }; _describe() { print -l -- ${(P)3} }; compadd() { print -l -- $@ }; "
    'source "$1"; words=(plainsong pu); CURRENT=2; _plainsong_completion',
    "fish": 'source $argv[1]; complete --do-complete "plainsong pu"',
}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_installed_completion_script_completes_in_its_shell(shell, client_only):
    if shutil.which(shell) is None:
        pytest.skip(f"NOT TESTED: {shell} is not installed here; etc/tools fetches it")
    script = client_only.parents[1] / "share" / COMPLETIONS[shell].format("plainsong")
    clean = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    command = [shell, *clean, "-c", ASKED[shell], *([] if shell == "fish" else [shell]), str(script)]
    done = subprocess.run(
        command, env=environ_of(client_only), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert re.findall(r"^\w+", done.stdout, re.MULTILINE) == ["publish"], done.stdout + done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_program_prints_the_completion_script_that_is_installed(shell, client_only):
    script = client_only.parents[1] / "share" / COMPLETIONS[shell].format("plainsong")
    assert run(client_only, "plainsong", "completion", shell).stdout.strip() == script.read_text().strip()


def test_man_finds_the_page_of_each_verb_where_the_wheels_are_installed(with_server):
    if shutil.which("man") is None:
        pytest.skip("NOT TESTED: man is not installed here")
    environ = {**environ_of(with_server), "MANWIDTH": "80", "LC_ALL": "C.UTF-8"}
    for name in ("plainsong", "plainsong-server", *(f"plainsong-{name}" for name in VERBS if name != "pipeline")):
        manual = ["man", "--manpath", str(with_server.parents[1] / "share/man"), "--pager", "cat", name]
        done = subprocess.run(manual, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{name.removesuffix('-server').upper()}(1)" in done.stdout
        assert done.stderr == ""


def test_the_pages_are_correct_roff():
    if shutil.which("mandoc") is None:
        pytest.skip("NOT TESTED: mandoc is not installed here; etc/tools fetches it")
    pages = [page for page in sorted(ROOT.glob("etc/dist/*/share/man/man1/*.1")) if page.name != "plainsong-server.1"]
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", *pages], capture_output=True, text=True, check=False
    )
    # The pages have no date, so that they change only with their content.
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []
    assert len(pages) == len(VERBS) + 1


# --- the server --------------------------------------------------------------------------------------


def test_the_server_has_a_script_of_its_own_which_is_the_same_program(with_server, url):
    assert run(with_server, "plainsong-server", "--version").stdout == f"plainsong {__version__}\n"
    assert "pyspark" not in run(with_server, "plainsong-server", "--help").stdout
    assert run(with_server, "plainsong-server", "doctor", "--ready", "--url", url).stdout


def test_the_server_serves_with_what_its_wheels_ask_for_and_its_client_publishes(with_server, tmp_path):
    daemon = Daemon(tmp_path / "data")
    program = daemon.command.index("serve") - 1
    daemon.command[program] = str(with_server.with_name("plainsong-server"))
    with daemon, Client("http://{}:{}".format(*daemon.address)) as client:
        client.create_topic("served")
        client.publish("served", b"hello")
        address = "http://{}:{}".format(*daemon.address)
        assert run(with_server, "plainsong", "poll", "served", "--url", address).stdout == "hello\n"
        done = run(with_server, "plainsong", "doctor", "--ready", "--url", address, "--json")
        assert json.loads(done.stdout)[0]["version"] == __version__


def test_incompatible_versions_are_named_and_nothing_starts(with_server, tmp_path):
    env = tmp_path / "env"
    shutil.copytree(with_server.parents[1], env, symlinks=True)
    (metadata,) = env.glob("lib/python*/site-packages/plainsong_server-*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {__version__}\n", "\nVersion: 0.9.7\n"))
    done = subprocess.run(
        [env / "bin/python", "-m", "plainsong", "serve"],
        env=environ_of(env / "bin/python"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.USAGE
    assert done.stderr == (
        f"error: plainsong-server 0.9.7 does not match plainsong-client {__version__}\nhint: install both at one version\n"
    )


# --- Spark -------------------------------------------------------------------------------------------


def test_the_spark_distribution_contains_the_source_and_the_jobs(with_spark):
    assert "archive" in run(with_spark, "plainsong", "pipeline", "list").stdout
    script = "from pyspark_plainsong import DefaultSource; print(DefaultSource.name())"
    assert run(with_spark, "python", "-c", script).stdout == "plainsong\n"
    listed = run(with_spark, "plainsong", "--help").stdout
    assert re.search(r"^  serve +\(not installed\)$", listed, re.MULTILINE)
