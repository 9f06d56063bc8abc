"""The verb `pipeline`: lists the jobs, starts one, prints its spark-submit line, and writes the zip that executors need.

The jobs there are: where each stands and what it says of itself, so that listing them loads none.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from plainsong.cli import output
from plainsong.cli.main import run as run_program
from plainsong.cli.output import echo_json
from plainsong.cli.verb import CommandFailed, Exit, VerbGroup, json_option
from plainsong.protocol.errors import nearest
from pyspark_plainsong.pipeline.session import worker_environ

if TYPE_CHECKING:
    from collections.abc import Sequence


class Listed(NamedTuple):
    """A job as ``plainsong pipeline list`` shows it."""

    package: str
    """What is run: ``python -m PACKAGE``."""
    says: str
    """One line; the job's own help begins with the same."""


#: By name, in the order people meet them.
JOBS: dict[str, Listed] = {
    "archive": Listed("pyspark_plainsong.pipeline.archive", "Keep topics as Parquet files, beyond their expiry."),
    "replay": Listed("pyspark_plainsong.pipeline.replay", "Publish archived messages again, in order."),
    "audit": Listed("pyspark_plainsong.pipeline.audit", "Audit trail, usage registry and lineage of datasets."),
    "report": Listed("pyspark_plainsong.pipeline.report", "Queues, throughput, latencies and hold times, with plots."),
    "maintain": Listed(
        "pyspark_plainsong.pipeline.maintain", "What waits to be cleaned, the plan; in HBase, the cleaning."
    ),
}


def job_named(name: str) -> Listed:
    """The job of that name. Raises CommandFailed naming the nearest one."""
    if name not in JOBS:
        raise CommandFailed(f"there is no job {name[:60]!r}", hint=nearest(name, JOBS), code=Exit.USAGE)
    return JOBS[name]


# --- command ---------------------------------------------------------------------------------------
#
# ``plainsong pipeline``: lists the jobs, starts one with the right interpreter and settings, or says how to submit
# it.


ZIP = "plainsong-pipeline.zip"


@click.group(cls=VerbGroup)
def pipeline() -> None:
    """Jobs on Spark: archive, replay, audit, report, maintain.

    They need the extra `plainsong[spark]` and Java 17. Each can be killed at
    any moment and started again.
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
@click.option("--master", metavar="URL", help="Of Spark; local[*] by default.")
@click.option("--print", "print_it", is_flag=True, help="Print the spark-submit line for a cluster, start nothing.")
@click.option("--zip", "zip_name", default=ZIP, metavar="FILE", help=f"For --print: what executors get; {ZIP}.")
@json_option
@click.argument("job")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(master: str | None, print_it: bool, zip_name: str, as_json: bool, job: str, arguments: Sequence[str]) -> None:
    """Start a job on this machine, or print how to submit it to a cluster.

    What stands behind JOB is the job's own, --json as well; `plainsong
    pipeline run JOB --help` explains it. This process becomes the job: signals
    and the exit code are its own.
    """
    listed = job_named(job)
    if print_it:
        line = submit_line(listed.package, arguments, master=master, zip_name=zip_name)
        if as_json:
            echo_json({"line": line})
        else:
            click.echo(line)
        return
    if find_spec(listed.package) is None:
        raise _not_installed(listed.package)
    more = [*(("--master", master) if master else ()), *(("--json",) if as_json else ())]
    passed = [*arguments, *(more if "--help" not in arguments else ())]
    sys.stdout.flush()
    command = [sys.executable, "-m", listed.package, *passed]
    os.execve(sys.executable, command, {**os.environ, **worker_environ()})  # noqa: S606


def submit_line(package: str, arguments: Sequence[str], *, master: str | None, zip_name: str = ZIP) -> str:
    """The line for a cluster whose executors have no package of ours: the driver's has ``plainsong[spark]``.

    Raises:
      CommandFailed: this one has not.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _not_installed(package)
    script = Path(spec.submodule_search_locations[0]) / "__main__.py"
    beside = Path(sys.executable).with_name("spark-submit")
    submit = str(beside) if shutil.which(beside.name) is None and beside.exists() else beside.name
    # Without it the driver would be whatever Python the executors are told to run, or the first on the PATH.
    driver = f"PYSPARK_DRIVER_PYTHON={shlex.quote(sys.executable)}"
    words = [submit, *(("--master", master) if master else ()), "--py-files", zip_name]
    return f"{driver} {shlex.join([*words, str(script), *arguments])}"


def _not_installed(package: str) -> CommandFailed:
    return CommandFailed(f"the package {package} is not installed", hint='pip install "plainsong[spark]"')


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
        click.echo(f"{out}: {count} files")


if __name__ == "__main__":
    sys.exit(run_program(pipeline, sys.argv[1:], "plainsong pipeline"))


# --- package ---------------------------------------------------------------------------------------
#
# The one zip that Spark's executors need: the connector, the frames it reads, and the jobs.


#: Workers need two files of ``protocol``; but spark-submit puts the zip before the driver's own packages, which
#: would then find no more of it than that.
PACKAGES = ("pyspark_plainsong", "pipeline", "protocol")
#: The earliest time a zip can hold, so that equal sources are equal zips.
_WHEN = (1980, 1, 1, 0, 0, 0)


def zip_files() -> dict[str, Path]:
    """Names in the zip, sorted, and the files. Raises CommandFailed: a package is not installed."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        folder = _folder(package)
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found[f"{package}/{path.relative_to(folder).as_posix()}"] = path
    return dict(sorted(found.items()))


def write_zip(out: Path) -> int:
    """Write it, whole or not at all; the number of files. Raises CommandFailed, OSError."""
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


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CommandFailed(f"the package {package} is not installed", hint='pip install "plainsong[spark]"')
    return Path(spec.submodule_search_locations[0])
