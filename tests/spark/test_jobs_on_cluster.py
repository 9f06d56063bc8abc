"""A cluster of two workers: jobs and a user's program, with the package on executors or only with its zip."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from plainsong import Client, Outgoing
from tests.daemon.harness import Daemon
from tests.documents import DOCUMENTS
from tests.pipeline.archives import raw_ids
from tests.spark.installed import SPARK, environ_of, make_interpreter
from tests.spark_session import QUICK_JVM, spark_home, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

GUIDE = DOCUMENTS["docs/spark.md"].partition("\n## Where Spark runs Python")[2]
ROWS = 1_000
PATIENCE_S = 600
SETTINGS = (
    "spark.executor.memory=512m",
    "spark.driver.host=127.0.0.1",
    "spark.driver.bindAddress=127.0.0.1",
    "spark.ui.enabled=false",
    "spark.sql.shuffle.partitions=2",
    f"spark.executor.extraJavaOptions={QUICK_JVM}",
)
CONF = [word for setting in SETTINGS for word in ("--conf", setting)]
#: One executor is enough to test what is installed on it: another costs one more JVM, with its Python processes.
ONE_EXECUTOR = "spark.cores.max=1"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("clustered") / "data") as daemon:
        yield "http://{}:{}".format(*daemon.address)


@pytest.fixture(scope="module")
def client(url):
    with Client(url) as opened:
        yield opened


@pytest.fixture(scope="module")
def orders(client):
    """The ids of a topic's messages."""
    client.create_topic("orders")
    client.publish(
        "orders", [Outgoing(str(number).encode(), attributes={"number": str(number)}) for number in range(ROWS)]
    )
    return [bytes(message.id) for message in client.read("orders")]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An interpreter for executors, with only pyspark and pyarrow."""
    python = make_interpreter(tmp_path_factory.mktemp("bare") / "env", only=SPARK)
    script = "import pyspark, pyarrow, importlib.util as u; print(u.find_spec('pyspark_plainsong'), u.find_spec('plainsong'))"
    assert run([python, "-I", "-c", script], python, python.parent) == "None None\n"
    return python


def run(command, python, folder, **environ):
    """Run a command in the environment of ``python`` until it ends; return its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ_of(python, XDG_CONFIG_HOME=str(folder), **environ),
        shell=isinstance(command, str),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if " INFO " not in line and not line.startswith("\tat ")]
    assert done.returncode == 0, "\n".join(told)[-3_000:]
    return done.stdout


def quick():
    """For drivers that need not find Spark themselves: with this SPARK_HOME, their JVM loads classes from an archive."""
    return {"SPARK_HOME": str(spark_home())}


@pytest.fixture(scope="module")
def archived(cluster, installed, bare, url, orders, tmp_path_factory):
    """The root of an archive of ``orders``, written by the printed command; the executors have only the zip."""
    folder = tmp_path_factory.mktemp("archived")
    plainsong = str(installed.with_name("plainsong"))
    run([plainsong, "pipeline", "zip"], installed, folder)
    job = ["archive", "append", "orders", "--root", str(folder / "archive"), "--url", url, *CONF]
    job += ["--conf", ONE_EXECUTOR]
    line = run([plainsong, "pipeline", "run", "--print", "--master", cluster.url, *job], installed, folder)
    run(line, installed, folder, PYSPARK_PYTHON=str(bare))
    return str(folder / "archive")


def test_the_printed_command_runs_unchanged_when_executors_have_only_the_zip(archived, orders):
    assert sorted(raw_ids(archived)) == orders


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.torture)])
def test_jobs_run_on_a_cluster_that_has_the_package(
    cluster, installed, bare, client, url, orders, archived, tmp_path, both
):
    """Jobs use the executors' interpreter, whatever ``python3`` on the PATH is."""
    start = [str(installed.with_name("plainsong")), "pipeline", "run", "--master", cluster.url]
    environ = {"PATH": f"{bare.parent}:{environ_of(installed)['PATH']}", **quick()}
    options = ("--url", url, *CONF)
    if both:
        root = "archive"
        run([*start, "archive", "append", "orders", "--root", root, *options], installed, tmp_path, **environ)
        assert sorted(raw_ids(str(tmp_path / root))) == orders
    else:
        root = os.path.relpath(archived, tmp_path)
    client.create_topic("again")
    run([*start, "replay", "orders", "--root", root, "--into", "again", *options], installed, tmp_path, **environ)
    again = list(client.read("again"))
    client.admin.delete_topic("again")
    assert [message.payload for message in again] == [str(number).encode() for number in range(ROWS)]
    assert [message.attributes["originalId"] for message in again] == [each.hex() for each in orders]


def test_a_program_runs_when_executors_have_the_zip_and_otherwise_gets_a_clear_error(
    cluster, installed, wheels, bare, client, url, tmp_path
):
    client.create_topic("elsewhere")
    run([installed.with_name("plainsong"), "pipeline", "zip"], installed, tmp_path)
    (advice,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    program = Path(__file__).with_name("elsewhere_program.py")
    without_pyarrow = make_interpreter(tmp_path / "env", wheels=wheels.values(), only=("pyspark", "py4j"))
    settings = [f"spark.master={cluster.url}", ONE_EXECUTOR, *SETTINGS]
    command = [installed, program, url, advice, without_pyarrow, *settings]
    said = run(command, installed, tmp_path, PYSPARK_PYTHON=str(bare), **quick())
    unknown = "ModuleNotFoundError: No module named 'pyspark_plainsong'"
    rows = "[b'0', b'1', b'2', b'3']"
    told = dict(json.loads(line) for line in said.splitlines())
    assert "Failed to find the data source: plainsong" in told.pop("found by Spark")
    assert f"run {without_pyarrow}, which has no pyarrow" in told.pop("registered, without pyarrow")
    assert told == {
        "registered": unknown,
        "registered by value": unknown,
        "with the zip, written": "None",
        "with the zip, read": rows,
        "with the zip, streamed": rows,
    }
