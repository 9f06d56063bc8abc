"""Spark's JVMs use the class archive that the tests make; a JVM silently ignores an archive that does not fit."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.spark_session import LAUNCHER_JVM, QUICK_JVM, make_archive, spark_environ, spark_home, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_a_jvm_of_spark_takes_its_classes_from_the_archive():
    make_archive()
    home = spark_home()
    assert home is not None
    options = QUICK_JVM.replace("-Xlog:disable", "-Xlog:class+load:stderr")
    environ = {**os.environ, **spark_environ(), "SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": options}
    environ["SPARK_LAUNCHER_OPTS"] = LAUNCHER_JVM
    done = subprocess.run(
        [home / "bin/spark-submit", "--version"], env=environ, capture_output=True, text=True, check=True
    )
    loaded = [line for line in done.stderr.splitlines() if " org.apache.spark." in line]
    from_archive = [line for line in loaded if line.endswith("shared objects file (top)")]
    assert from_archive, "the archive does not fit this class path"
