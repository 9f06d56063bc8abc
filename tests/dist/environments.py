"""Virtual environments with exactly the packages that a wheel requires."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterable
from email.message import Message
from email.parser import Parser
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.patience import PATIENCE_S
from tests.spark.installed import environ_of, install


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def required(wheel: Path) -> dict[str, Distribution]:
    """Return the installed packages that the wheel needs, directly or indirectly, without extras and without ours."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(each) for each in metadata_of(wheel).get_all("Requires-Dist", [])]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in found or name.startswith("plainsong-"):
            continue
        found[name] = distribution(name)
        assert requirement.specifier.contains(found[name].version, prereleases=True), requirement
        waiting += [Requirement(each) for each in found[name].requires or []]
    return found


def is_compiled(package: Distribution) -> bool:
    """True if a package has extension modules, which load only in one version of Python."""
    return any(path.suffix == ".so" for path in package.files or ())


def environment(
    folder: Path, wheels: Iterable[Path], base: str = sys.executable, without: Collection[str] = ()
) -> Path:
    """Create an environment with these wheels and links to their requirements only; return its interpreter.

    Args:
      folder: where to create it; must not exist.
      base: the Python that creates the environment. Extension modules of another version do not load there, so
        ``msgpack`` and ``fastavro`` run in pure Python.
      without: requirements that are left out.
    """
    wheels = list(wheels)
    own = base == sys.executable
    # Our pip may not run in another version of Python, so that version's own pip installs into the environment.
    without_pip = ["--without-pip"] if own or _pip_of(base) else []
    subprocess.run([base, "-m", "venv", *without_pip, str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for wheel in wheels:
        for name, needed in required(wheel).items():
            if name in without:
                continue
            tops = {path.parts[0] for path in needed.files or () if path.parts[0] not in ("..", "__pycache__", "bin")}
            for top in tops:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(needed.locate_file(top))))
    python = folder / "bin" / "python"
    if own:
        install(python, wheels)
    else:
        done = pip_install(base, python, "--no-index", *map(str, wheels))
        assert done.returncode == 0, done.stderr
    return python


@cache
def _pip_of(base: str) -> bool:
    """True if this Python has a pip that can install into other environments."""
    look = "import sys; from importlib.metadata import version; sys.exit(int(version('pip').split('.')[0]) < 23)"
    return subprocess.run([base, "-c", look], capture_output=True, check=False).returncode == 0


def pip_install(base: str, python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Install packages without their dependencies into an environment that the Python ``base`` has created."""
    pip = [base, "-m", "pip", "--python", str(python)] if _pip_of(base) else [str(python), "-m", "pip"]
    return subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check", *arguments],
        env=environ_of(python),
        capture_output=True,
        text=True,
        check=False,
    )


def run(python: Path, *command: str, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program from the interpreter's folder, or the interpreter itself."""
    program = python if command[0] == "python" else python.with_name(command[0])
    done = subprocess.run(
        [str(program), *command[1:]],
        cwd=cwd or python.parents[1],
        env=environ_of(python),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
