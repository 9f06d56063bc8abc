"""The common part of all jobs: listing, starting, requirements and reporting."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import zipfile
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from prometheus_client.parser import text_string_to_metric_families

from plainsong.cli.command import CommandFailed, Exit, Verb
from plainsong.cli.job import JobProgress
from plainsong.cli.job_metrics import METRICS, PREFIX, JobMetrics
from plainsong.cli.main import run as run_program
from plainsong.protocol.errors import TopicNotFound, Unavailable
from pyspark_plainsong.pipeline import command as pipeline_command
from pyspark_plainsong.pipeline import session
from pyspark_plainsong.pipeline.command import JOBS, ListedJob, pipeline, write_zip
from pyspark_plainsong.pipeline.job import Run, job_options, reason_of
from tests.daemon.harness import ROOT
from tests.documents import DOCUMENTS, shell_lines

PAGE = DOCUMENTS["docs/pipeline.md"]


def said(capsys, *arguments):
    code = run_program(pipeline, arguments, "plainsong pipeline")
    out, err = capsys.readouterr()
    return code, out, err


# --- starting ----------------------------------------------------------------------------------------


def test_all_jobs_are_listed(capsys):
    assert [line.split()[0] for line in said(capsys, "list")[1].splitlines()] == list(JOBS)
    assert {each["job"] for each in json.loads(said(capsys, "list", "--json")[1])} == set(JOBS)


def test_an_unknown_job_is_refused_with_the_nearest_name(capsys):
    code, _, err = said(capsys, "run", "arxive")
    assert code == Exit.USAGE
    assert "did you mean 'archive'?" in err


def test_a_job_replaces_the_process_that_starts_it(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(pipeline_command.os, "execve", lambda path, args, environ: became.append((path, args, environ)))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    said(capsys, "run", "--master", "local[1]", "archive", "append", "orders", "--root", "x")
    ((path, arguments, environ),) = became
    assert path == environ["PYSPARK_PYTHON"] == sys.executable
    words = ["-m", "pyspark_plainsong.pipeline.archive", "append", "orders", "--root", "x", "--master", "local[1]"]
    assert arguments == [sys.executable, *words]
    assert str(ROOT) in environ["PYTHONPATH"].split(os.pathsep)


def test_maintain_is_a_command_of_the_daemon_and_has_no_line_for_a_cluster(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(pipeline_command.os, "execve", lambda path, args, environ: became.append(args[1:]))
    said(capsys, "run", "--master", "local[1]", "maintain", "--dry-run", "orders")
    assert became == [["-m", "broker.command.maintain", "--dry-run", "orders", "--master", "local[1]"]]
    assert said(capsys, "run", "--print", "maintain", "or*")[1] == "plainsong maintain 'or*'\n"


def test_a_job_of_a_package_that_is_not_installed_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(JOBS, "absent", ListedJob("nowhere.at.all", "A job."))
    for more in ((), ("--print",)):
        code, _, err = said(capsys, "run", *more, "absent")
        assert (code, "the package nowhere.at.all is not installed" in err) == (Exit.FAILED, True)


@pytest.mark.parametrize("found", [None, "/opt/spark/bin/spark-submit"])
def test_the_line_for_a_cluster_can_be_pasted(capsys, monkeypatch, found):
    """The line works even if the spark-submit next to the interpreter is not on the PATH."""
    monkeypatch.setattr(pipeline_command.shutil, "which", lambda name: found)
    _, out, _ = said(capsys, "run", "--print", "--master", "spark://host:7077", "archive", "compact", "--root", "a b")
    script = ROOT / "pyspark_plainsong" / "pipeline" / "archive" / "__main__.py"
    submit = "spark-submit" if found else Path(sys.executable).with_name("spark-submit")
    words = f"--master spark://host:7077 --py-files plainsong-pipeline.zip {script} compact --root 'a b'"
    assert out == f"PYSPARK_DRIVER_PYTHON={sys.executable} {submit} {words}\n"


def test_the_zip_has_everything_that_an_executor_imports_and_nothing_else(tmp_path):
    write_zip(tmp_path / "one.zip")
    write_zip(tmp_path / "other.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "other.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "one.zip").namelist()
    assert {"pyspark_plainsong/source.py", "plainsong/protocol/frames.py", "pyspark_plainsong/pipeline/job.py"} <= set(
        names
    )
    assert {name.split("/")[0] for name in names} == {"pyspark_plainsong", "plainsong"}
    script = "import plainsong.protocol.frames as frames, pyspark_plainsong; print(frames.__file__, pyspark_plainsong.__file__)"
    environ = {"PYTHONPATH": str(tmp_path / "one.zip"), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-c", script]  # without site-packages
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(tmp_path / "one.zip")) for path in done.stdout.split())


def test_help_needs_no_spark():
    for job in ("archive", "replay"):
        script = f"import sys; sys.modules['pyspark'] = None; import runpy; sys.argv = ['{job}', '--help']"
        script += f"; runpy.run_module('pyspark_plainsong.pipeline.{job}', run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Usage: plainsong pipeline run" in done.stdout


# --- surroundings ------------------------------------------------------------------------------------


def imported_by_a_worker(*path):
    """Return where a Python process with this PYTHONPATH finds pyspark, and whether the user's own sitecustomize ran."""
    script = "import sys, pyspark; print(pyspark.__file__, hasattr(sys, 'customized'))"
    environ = {"PYTHONPATH": os.pathsep.join(map(str, path)), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    file, customized = done.stdout.split()
    return Path(file), customized == "True"


def test_python_processes_of_a_job_import_the_installed_pyspark_and_do_not_compile_its_zip(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = True\n")
    installed = Path(find_spec("pyspark").origin)
    packed = installed.parent / "python/lib/pyspark.zip"
    assert imported_by_a_worker(packed, tmp_path) == (packed / "pyspark/__init__.py", True)  # as Spark starts them
    assert imported_by_a_worker(packed, session.STARTUP, tmp_path) == (installed, True)
    other = tmp_path / "pyspark/python/lib/pyspark.zip"  # of a Spark that is not installed as a package
    other.parent.mkdir(parents=True)
    other.symlink_to(packed)
    assert imported_by_a_worker(other, session.STARTUP, packed.parent) == (other / "pyspark/__init__.py", False)


def test_the_module_that_python_processes_of_a_job_start_with_needs_no_other_of_its_name():
    # Imported by hand, since many systems have a sitecustomize of their own.
    script = f"import contextlib, pathlib, sys; sys.path[:] = [{str(session.STARTUP)!r}]; import sitecustomize"
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def lacking(environ):
    with pytest.raises(CommandFailed) as raised:
        session.check_surroundings({"PATH": os.environ["PATH"], **environ})
    assert raised.value.code == Exit.USAGE
    return raised.value.message + "\n" + raised.value.hint


def test_missing_java_is_reported():
    assert "there is no Java" in lacking({"PATH": "/nowhere"})
    assert "JAVA_HOME is /nowhere, but" in lacking({"JAVA_HOME": "/nowhere"})


def test_an_old_java_is_reported(tmp_path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    assert "is Java 11; Spark needs 17 or newer" in lacking({"JAVA_HOME": str(tmp_path)})


@pytest.mark.parametrize("package", ["pyspark", "pyarrow"])
def test_a_missing_package_is_reported(monkeypatch, package):
    real = session.find_spec
    monkeypatch.setattr(session, "find_spec", lambda name: None if name == package else real(name))
    says = lacking({})
    assert f"{package} is not installed for {sys.executable}" in says
    assert "pip install plainsong-spark" in says


@pytest.fixture
def java(tmp_path):
    path = tmp_path / "jre" / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\" 2021-10-19' >&2\n")
    path.chmod(0o755)
    return str(tmp_path / "jre")


def test_an_interpreter_for_workers_without_the_packages_is_reported(tmp_path, java):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    says = lacking({"JAVA_HOME": java, "PYSPARK_PYTHON": str(bare)})
    assert "lacks what Spark's workers need: ModuleNotFoundError: No module named 'pyspark'" in says
    assert f"set it to {sys.executable}" in says


def test_a_missing_interpreter_for_workers_is_reported(java):
    assert "PYSPARK_PYTHON is /nowhere/python, which cannot be run" in lacking(
        {"JAVA_HOME": java, "PYSPARK_PYTHON": "/nowhere/python"}
    )


def test_an_interpreter_for_workers_of_another_version_is_reported(tmp_path, java):
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    assert "PYSPARK_DRIVER_PYTHON is Python 3.9" in lacking({"JAVA_HOME": java, "PYSPARK_DRIVER_PYTHON": str(other)})


# --- a run, from its options to its end --------------------------------------------------------------


def job(body):
    @click.command(cls=Verb)
    @job_options("archive")
    def made(run: Run) -> None:
        """Made for a test."""
        body(run)

    return made


def ran(body, *arguments):
    return run_program(job(body), arguments, "job")


def samples(file):
    families = text_string_to_metric_families(file.read_text())
    return {sample.name.removeprefix(PREFIX): sample.value for family in families for sample in family.samples}


def test_a_run_gets_its_options(monkeypatch):
    monkeypatch.delenv("PLAINSONG_URL", raising=False)
    runs = []
    options = ["--url", "http://a:1,http://b:2", "-n", "shop", "--master", "local[1]", "--dry-run"]
    assert ran(runs.append, *options, "--conf", "spark.a=1", "--conf", "spark.b=x=y", "--token-file", "token") == 0
    (run,) = runs
    assert (run.job, run.master, run.dry_run, run.conf) == (
        "archive",
        "local[1]",
        True,
        {"spark.a": "1", "spark.b": "x=y"},
    )
    source = {"url": "http://a:1,http://b:2", "namespace": "shop", "tokenFile": str(Path("token").absolute())}
    assert run.source(topic="orders") == {**source, "topic": "orders"}
    assert ran(runs.append, "--conf", "a=1") == Exit.USAGE


def failing(error):
    def fail(run):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandFailed("no", code=Exit.STORE), Exit.STORE),
        (TopicNotFound("no"), Exit.NOT_FOUND),
        (Unavailable("no"), Exit.UNAVAILABLE),
        (OSError(28, "No space left on device", "archive"), Exit.FAILED),
        (KeyboardInterrupt(), Exit.INTERRUPTED),
    ],
)
def test_every_exit_code_is_in_the_metrics_too(tmp_path, capsys, error, code):
    file = tmp_path / "metrics" / "archive.prom"
    assert ran(failing(error), "--metrics-file", str(file), "--json") == code
    assert samples(file)["exit_code"] == code
    assert "last_success_time_seconds" not in samples(file)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (events[-1]["event"], events[-1]["exit"]) == ("end", code)


def test_a_failed_run_leaves_the_last_success_as_it_was(tmp_path):
    file = tmp_path / "archive.prom"
    ran(lambda run: run.metrics.add("rows_total", 5, topic="orders"), "--metrics-file", str(file))
    good = samples(file)
    assert (good["exit_code"], good["rows_total"]) == (0, 5)
    ran(failing(CommandFailed("no")), "--metrics-file", str(file))
    assert samples(file)["last_success_time_seconds"] == good["last_success_time_seconds"]
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_sigterm_ends_a_run_as_an_interruption(tmp_path):
    file = tmp_path / "archive.prom"
    body = lambda run: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    assert ran(body, "--metrics-file", str(file)) == Exit.INTERRUPTED
    assert samples(file)["exit_code"] == Exit.INTERRUPTED


def test_an_interrupted_run_ends_as_one_whatever_fails_during_its_cleanup(tmp_path):
    file = tmp_path / "archive.prom"

    def body(run):
        run.close = partial(failing(ConnectionRefusedError("the JVM has gone")), run)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise RuntimeError("the query cannot be stopped")

    assert ran(body, "--metrics-file", str(file)) == Exit.INTERRUPTED
    assert samples(file)["exit_code"] == Exit.INTERRUPTED


def test_the_reason_of_an_error_of_spark_is_the_python_error_within():
    told = """An exception was thrown:
org.apache.spark.SparkException: Job aborted
\tat org.apache.spark.Something(Something.scala:1)
Traceback (most recent call last):
  File "x.py", line 1, in read
pyspark_plainsong.wire.BrokerError: there is no topic orders

\tat org.apache.spark.Else(Else.scala:2)
Caused by: java.lang.RuntimeException: wrapped
"""
    assert reason_of(RuntimeError(told)) == "BrokerError: there is no topic orders"
    lost = told.replace("wire.BrokerError: there is no topic orders", "subscription.DataLoss: messages have expired")
    assert reason_of(RuntimeError(lost)) == "DataLoss: messages have expired"
    assert reason_of(RuntimeError("[SOME_CLASS] What it is.\nmore")) == "[SOME_CLASS] What it is."
    assert reason_of(RuntimeError()) == "RuntimeError"


# --- progress ----------------------------------------------------------------------------------------


def test_progress_shows_rates_lag_and_remaining_time(capsys):
    now = [0.0]
    progress = JobProgress("archive", shown=True, clock_s=lambda: now[0])
    now[0] = 2.0
    progress.step(2_000, of=10_000, what="orders", batch=3, lag_s=90)
    progress.step(2_001)  # too soon
    progress.clear()
    progress.clear()
    line = "orders, batch 3, 2 000 rows of 10 000, 1 000/s, 1m 30s behind, 8s left"
    assert capsys.readouterr().err == f"\r{line}\x1b[K\r\x1b[K"


def test_progress_for_programs_has_one_event_in_a_line(capsys):
    now = [0.0]
    progress = JobProgress("archive", as_json=True, clock_s=lambda: now[0])
    now[0] = 2.0
    progress.step(2_000, what="orders", batch=3, offset="x")
    progress.warn("late", "behind", topic="orders")
    progress.result("done", "archived", rows=2_000)
    step, warning, result = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert {"event": "progress", "rows": 2_000, "rowsPerSecond": 1_000, "offset": "x"}.items() <= step.items()
    assert "of" not in step
    assert (warning["warning"], warning["topic"], result["rows"]) == ("behind", "orders", 2_000)


def test_progress_can_be_switched_off_and_warnings_cannot(capsys):
    progress = JobProgress("archive", shown=False)
    progress.step(1, last=True)
    progress.note("starting")
    assert capsys.readouterr().err == ""
    progress.warn("late", "behind")
    assert capsys.readouterr().err == "warning: late\n"


# --- the page ----------------------------------------------------------------------------------------


def test_the_page_describes_every_metric_with_its_kind_and_no_other():
    told = dict(re.findall(rf"^\| `{PREFIX}(\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    assert told == {name: known.kind.__name__.lower() for name, known in METRICS.items()}
    for name, known in METRICS.items():
        metrics = JobMetrics("archive")
        touch = metrics.add if name.endswith("_total") else metrics.set
        touch(name, 1, **dict.fromkeys(known.labels, "x"))
        assert f"{PREFIX}{name}{{" in metrics.text()


def test_the_page_lists_every_job_with_its_summary():
    assert set(re.findall(r"^\| (?:\[(\w+)\]|`(\w+)`)", PAGE.split("## Running")[0], re.MULTILINE)) <= {
        pair for name in JOBS for pair in ((name, ""), ("", name))
    }
    assert all(name in PAGE for name in JOBS)


def test_every_line_of_the_page_that_runs_a_job_can_be_parsed():
    lines = [shlex.split(line)[3:] for line in shell_lines(PAGE) if line.startswith("plainsong pipeline run ")]
    assert len(lines) > 5
    for line in lines:
        told = pipeline.commands["run"].make_context("run", line).params
        words = list(told["arguments"])
        if "--help" in words:
            continue
        module = import_module(f"{JOBS[told['job']].package}.__main__")
        (command,) = (each for each in vars(module).values() if isinstance(each, click.Command))
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0))
        command.make_context("job", words)


def test_no_job_imports_pyspark_before_it_runs():
    """An import at the top of a command's module would delay help and errors."""
    folder = ROOT / "pyspark_plainsong" / "pipeline"
    paths = [*folder.glob("*.py"), *folder.glob("*/command.py")]
    assert len(paths) > 8
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top]
        assert not {name.split(".")[0] for name in names} & {"pyspark", "pyarrow"}, path
