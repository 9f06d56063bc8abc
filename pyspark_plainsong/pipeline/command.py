"""The verb `pipeline`: lists the jobs, starts one, prints its spark-submit line, and writes the zip for executors."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, VerbGroup, json_option
from plainsong.cli.main import run as run_program
from plainsong.cli.output import echo_json
from plainsong.protocol.errors import nearest
from pyspark_plainsong.pipeline.session import worker_environ

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec


class ListedJob(NamedTuple):
    """A job as ``plainsong pipeline list`` shows it; listing loads no job."""

    package: str
    """``python -m PACKAGE`` runs the job."""
    says: str
    """One line; the job's own help begins with the same."""
    on_spark: bool = True


#: By name, in the order people meet them.
JOBS: dict[str, ListedJob] = {
    "archive": ListedJob("pyspark_plainsong.pipeline.archive", "Keep topics as Delta tables, beyond their expiry."),
    "replay": ListedJob("pyspark_plainsong.pipeline.replay", "Publish archived messages again, in order."),
    "audit": ListedJob("pyspark_plainsong.pipeline.audit", "Audit trail, usage registry and lineage of datasets."),
    "report": ListedJob(
        "pyspark_plainsong.pipeline.report", "Queues, throughput, latencies and hold times, with plots."
    ),
    # The daemon's own command `plainsong maintain`, kept here for compatibility.
    "maintain": ListedJob(
        "broker.command.maintain", "Show rows that wait to be cleaned; clean tables in HBase.", on_spark=False
    ),
}
ZIP = "plainsong-pipeline.zip"
#: Packages in the zip. Executors need only ``protocol.frames`` of ``plainsong``, but spark-submit puts the zip before
#: the driver's own packages, so the driver would miss the rest.
PACKAGES = ("pyspark_plainsong", "plainsong")
#: The earliest time that a zip can hold, so that equal sources make equal zips.
_WHEN = (1980, 1, 1, 0, 0, 0)


@click.group(cls=VerbGroup)
def pipeline() -> None:
    """Run the jobs that archive, replay and audit messages.

    They need the distribution `plainsong-spark` and Java 17; only maintain runs
    without Spark. Each can be killed at any moment and started again.
    """


@pipeline.command(name="list", examples=["plainsong pipeline list"])
@json_option
def list_jobs(as_json: bool) -> None:
    """List the jobs."""
    if as_json:
        echo_json([{"job": name, "says": listed.says, "package": listed.package} for name, listed in JOBS.items()])
    else:
        output.echo_lines(output.facts([(name, listed.says) for name, listed in JOBS.items()]))


@pipeline.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    examples=[
        "plainsong pipeline run archive --help",
        "plainsong pipeline run archive append orders --root archive",
        "plainsong pipeline run --print --master spark://host:7077 \\",
        "    archive append orders --root hdfs://host/archive",
    ],
)
@click.option("--master", metavar="URL", help="Spark master; default: local[*].")
@click.option("--print", "print_it", is_flag=True, help="Print the spark-submit command for a cluster; start nothing.")
@click.option(
    "--zip", "zip_name", default=ZIP, metavar="FILE", help=(f"For --print: the zip for the executors; default: {ZIP}.")
)
@json_option
@click.argument("job")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(master: str | None, print_it: bool, zip_name: str, as_json: bool, job: str, arguments: Sequence[str]) -> None:
    """Start a job on this machine, or print how to submit it to a cluster.

    Everything after JOB goes to the job, --json too; `plainsong pipeline run JOB
    --help` explains it. This process becomes the job: signals reach it, and the
    exit code is its own.
    """
    listed = job_named(job)
    if print_it:
        line = (
            submit_line(listed.package, arguments, master=master, zip_name=zip_name)
            if listed.on_spark
            else shlex.join(["plainsong", job, *arguments])
        )
        if as_json:
            echo_json({"line": line})
        else:
            click.echo(line)
        return
    if _spec(listed.package) is None:
        raise _not_installed(listed.package)
    more = [*(("--master", master) if master else ()), *(("--json",) if as_json else ())]
    passed = [*arguments, *(more if "--help" not in arguments else ())]
    sys.stdout.flush()
    command = [sys.executable, "-m", listed.package, *passed]
    os.execve(sys.executable, command, {**os.environ, **worker_environ()})  # noqa: S606


def job_named(name: str) -> ListedJob:
    """Return the job of that name. Raises CommandFailed, which suggests the nearest job."""
    if name not in JOBS:
        raise CommandFailed(f"unknown job {name[:60]!r}", hint=nearest(name, JOBS), code=Exit.USAGE)
    return JOBS[name]


def submit_line(package: str, arguments: Sequence[str], *, master: str | None, zip_name: str = ZIP) -> str:
    """Return the spark-submit line for a cluster that gets our packages from the zip.

    Raises:
      CommandFailed: ``package`` is not installed here.
    """
    script = _folder(package) / "__main__.py"
    beside = Path(sys.executable).with_name("spark-submit")
    submit = str(beside) if shutil.which(beside.name) is None and beside.exists() else beside.name
    # Otherwise the driver would run with PYSPARK_PYTHON, the executors' interpreter, or the first python3 on the PATH.
    driver = f"PYSPARK_DRIVER_PYTHON={shlex.quote(sys.executable)}"
    words = [submit, *(("--master", master) if master else ()), "--py-files", zip_name]
    return f"{driver} {shlex.join([*words, str(script), *arguments])}"


@pipeline.command(name="zip", examples=[f"plainsong pipeline zip {ZIP}"])
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False), default=ZIP)
@json_option
def zip_command(out: Path, as_json: bool) -> None:
    """Write the zip that executors need when the package is not installed there.

    For `spark-submit --py-files`, and for `spark.addArtifact` in a notebook.
    """
    count = write_zip(out)
    if as_json:
        echo_json({"file": str(out), "files": count})
    else:
        click.echo(f"{out}: {output.counted(count, 'file')}")


def write_zip(out: Path) -> int:
    """Write the zip atomically; return the number of its files. Raises CommandFailed, OSError."""
    files = zip_files()
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, path in files.items():
                archive.writestr(zipfile.ZipInfo(name, _WHEN), path.read_bytes(), zipfile.ZIP_DEFLATED)
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    return len(files)


def zip_files() -> dict[str, Path]:
    """Return the files by their names in the zip, sorted. Raises CommandFailed: a package is not installed."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        folder = _folder(package)
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found[f"{package}/{path.relative_to(folder).as_posix()}"] = path
    return dict(sorted(found.items()))


def _folder(package: str) -> Path:
    spec = _spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _not_installed(package)
    return Path(spec.submodule_search_locations[0])


def _spec(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except ModuleNotFoundError:  # an enclosing package is missing
        return None


def _not_installed(package: str) -> CommandFailed:
    return CommandFailed(f"the package {package} is not installed", hint="pip install plainsong-spark")


if __name__ == "__main__":
    sys.exit(run_program(pipeline, sys.argv[1:], "plainsong pipeline"))
