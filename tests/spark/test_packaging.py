"""Tests which modules import Spark, and the errors if a part of it is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from installed import EXTRA, SPARK, environ_of, make_interpreter

from plainsong import Client
from plainsong.cli.command import Exit
from tests.daemon.harness import PLAINSONG, ROOT, Daemon
from tests.patience import SPARK_PATIENCE_S
from tests.spark_session import why_not

APPEND = ("pipeline", "run", "archive", "append", "orders", "--root", "archive")


def run(python: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Run the ``plainsong`` next to an interpreter; return its exit code and standard error."""
    done = subprocess.run(
        [str(python.with_name("plainsong")), *arguments],
        cwd=python.parents[1],
        env=environ_of(python, **environ),
        capture_output=True,
        text=True,
        timeout=SPARK_PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stderr


def test_no_file_of_a_job_hides_a_module_that_others_import():
    """spark-submit puts the folder of the program that it runs first on the import path."""
    others = sys.stdlib_module_names | packages_distributions().keys()
    for folder in [each.parent for each in (ROOT / "pyspark_plainsong" / "pipeline").glob("*/__main__.py")]:
        stems = {path.stem for path in folder.iterdir() if path.stem.isidentifier() and path.stem[0] != "_"}
        assert not stems & others, folder


# --- who imports it ----------------------------------------------------------------------------------


def modules(errors: str) -> set[str]:
    """The modules that ``-X importtime`` names."""
    return {line.rpartition("|")[2].strip() for line in errors.splitlines() if "import time:" in line}


def imported(errors: str) -> set[str]:
    """The packages of these modules."""
    return {name.partition(".")[0] for name in modules(errors)}


@pytest.mark.parametrize("arguments", [("--help",), ("pipeline", "list"), ("pipeline", "run", "--help")])
def test_the_command_line_does_not_import_spark(arguments):
    command = [sys.executable, "-X", "importtime", str(PLAINSONG), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "click" in imported(done.stderr)
    assert not imported(done.stderr) & {*EXTRA}


def test_the_daemon_imports_neither_spark_nor_a_client(tmp_path):
    with Daemon(tmp_path / "data", wrapper=[sys.executable, "-X", "importtime"]) as daemon:
        with Client("http://{}:{}".format(*daemon.address)) as client:
            client.create_topic("orders")
            client.publish("orders", [b"first"])
            assert [message.payload for message in client.read("orders")] == [b"first"]
        assert daemon.stop() == 0
    assert "plyvel" in imported(daemon.errors)
    assert not imported(daemon.errors) & {*EXTRA, "pyspark_plainsong"}
    ours = {name for name in modules(daemon.errors) if name.startswith("plainsong.")}
    assert any(name.startswith("plainsong.protocol") for name in ours)
    assert not [
        name for name in ours if not name.startswith(("plainsong.protocol", "plainsong.cli", "plainsong.hints"))
    ]


# --- where something is missing ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(wheels, tmp_path_factory):
    """An environment with the package but without the extra."""
    return make_interpreter(tmp_path_factory.mktemp("plain") / "env", wheels=wheels.values(), without=EXTRA)


@pytest.mark.parametrize(
    "job", [APPEND, (*APPEND, "--dry-run"), ("pipeline", "run", "replay", "orders", "--into", "x")]
)
def test_without_the_extra_a_job_says_what_to_install(plain, job):
    arguments = job if "--root" in job else (*job, "--root", "archive")
    code, error = run(plain, *arguments)
    assert code == Exit.USAGE
    assert error == f"error: pyspark is not installed for {plain}\nhint: pip install plainsong-spark\n"
    assert not (plain.parents[1] / "archive").exists()


def test_without_the_extra_help_and_the_list_of_jobs_work(plain):
    assert run(plain, "pipeline", "list") == (Exit.OK, "")
    assert run(plain, "pipeline", "run", "archive", "append", "--help") == (Exit.OK, "")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An interpreter for Spark's workers without any package of Plainsong."""
    return make_interpreter(tmp_path_factory.mktemp("bare") / "env", only=SPARK)


@pytest.fixture(scope="module")
def without_pyarrow(plain):
    """Return variables that let the same interpreter find pyspark but nothing else of the extra."""
    folder = plain.parents[1] / "pyspark alone"
    folder.mkdir()
    for name in ("pyspark", "py4j"):
        (folder / name).symlink_to(Path(sysconfig.get_path("purelib"), name))
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A daemon with a topic. Jobs ask the daemon for the topic before they start Spark."""
    with Daemon(tmp_path_factory.mktemp("packaged") / "data") as daemon:
        address = "http://{}:{}".format(*daemon.address)
        with Client(address) as client:
            client.create_topic("orders")
        yield address


def test_a_job_without_pyarrow_says_what_to_install(plain, without_pyarrow, url):
    code, error = run(plain, *APPEND, "--url", url, **without_pyarrow)
    assert code == Exit.USAGE
    assert error == f"error: pyarrow is not installed for {plain}\nhint: pip install plainsong-spark\n"


def test_a_job_without_java_says_what_to_install(installed, url):
    code, error = run(installed, *APPEND, "--url", url, PATH=str(installed.parent))
    assert code == Exit.USAGE
    assert error.startswith("error: there is no Java on the PATH, and JAVA_HOME is not set\nhint: install Java 17")


def test_a_session_without_java_says_so(installed, tmp_path):
    """The user creates this session; no code of Plainsong runs in it."""
    for tool in ("bash", "env", "dirname", "ps"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    script = "from pyspark.sql import SparkSession; SparkSession.builder.getOrCreate()"
    environ = environ_of(installed, PATH=f"{installed.parent}:{tmp_path}")
    done = subprocess.run([installed, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "JAVA_HOME is not set" in done.stderr
    assert "[JAVA_GATEWAY_EXITED]" in done.stderr


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_job_whose_workers_would_lack_the_package_says_which_interpreter(installed, bare, url):
    code, error = run(installed, *APPEND, "--url", url, PYSPARK_PYTHON=str(bare))
    assert code == Exit.USAGE
    why = "lacks what Spark's workers need: ModuleNotFoundError: No module named 'pyspark_plainsong'"
    unset = f"unset PYSPARK_PYTHON, or set it to {installed}; for executors that get the zip, use spark-submit"
    assert error.startswith(f"error: PYSPARK_PYTHON is {bare}, which {why}\nhint: {unset}: ")
