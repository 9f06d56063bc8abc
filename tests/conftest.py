"""Settings and fixtures of all rings: the order of the rings, Hypothesis profiles, and quiet logs."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import trio._core._run as scheduling
from hypothesis import HealthCheck, settings

from scripts import dist
from tests.rings import RINGS
from tests.spark.installed import make_interpreter
from tests.spark_session import (
    ADAPTIVE,
    FEW_ROWS_ARGS,
    LAUNCHER_JVM,
    QUICK_JVM,
    make_archive,
    open_session,
    spark_home,
    why_not,
)

_HERE = Path(__file__).parent
_ORDER = [path.split("/")[1] for ring in RINGS if not ring.folder for path in ring.paths]

# Tools that were downloaded for the tests, such as promtool.
os.environ["PATH"] = f"{_HERE.parent / '.cache/tools'}{os.pathsep}{os.environ.get('PATH', '')}"
# Hundreds of processes start: without bytecode files each would compile all modules, and take twice as long to serve.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A Spark driver does not live long enough to profit from the JVM's optimizing compiler.
os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_JVM)
os.environ.setdefault("SPARK_LAUNCHER_OPTS", LAUNCHER_JVM)
os.environ.setdefault("PYSPARK_SUBMIT_ARGS", FEW_ROWS_ARGS)
if (_home := spark_home()) is not None:
    os.environ.setdefault("SPARK_HOME", str(_home))

# A time limit per example would measure the machine's load. The ordinary run repeats the same search, so that it fails
# only because of a change; torture looks for new examples.
settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("torture", settings.get_profile("house"), derandomize=False, max_examples=5_000)
settings.load_profile("house")


def _ring(item: pytest.Item) -> int:
    first = item.path.relative_to(_HERE).parts[0] if item.path.is_relative_to(_HERE) else ""
    return _ORDER.index(first) if first in _ORDER else len(_ORDER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_ring)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the order in which trio runs ready tasks, so that it is the same each time, except in torture."""
    if settings.get_current_profile_name() == "house":
        scheduling._r.seed(item.nodeid)


def pytest_collection_finish() -> None:
    """Freeze imported objects: scanning them for garbage took a tenth of an inner ring's processor time."""
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let SIGTERM end the run, and everything that fixtures have started.

    Ctrl-C alone may fail only one test: pytest-trio treats a KeyboardInterrupt as an error of the test.
    """

    def end(number: int, _: object) -> None:
        session.shouldstop = signal.Signals(number).name
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by shells for background jobs, and inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def spark():
    """A Spark session, shared because it takes seconds to start."""
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    make_archive()
    session = open_session()
    yield session
    session.stop()


@pytest.fixture
def adaptive(spark):
    """Let Spark plan the rest of a query again after each of its stages, as it does by default."""
    spark.conf.set(ADAPTIVE, "true")
    yield
    spark.conf.set(ADAPTIVE, "false")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A standalone Spark cluster, shared like the session: its workers start new executors for each application."""
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    make_archive()
    from tests.spark.cluster import Cluster  # not at the top: the inner rings need no pyspark

    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory):
    """A running ZooKeeper, shared; a test that kills one starts its own."""
    from tests.hbase_server import why_not  # not at the top: the inner rings need no HBase
    from tests.zookeeper_server import ZooKeeperServer

    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """The three distributions by kind: client, server, spark."""
    folder = tmp_path_factory.mktemp("wheels")
    return {kind: dist.build(kind, folder) for kind in dist.KINDS}


@pytest.fixture(scope="session")
def installed(wheels, tmp_path_factory):
    """The interpreter of an environment with all wheels and their extras."""
    return make_interpreter(tmp_path_factory.mktemp("installed") / "env", wheels=wheels.values())
