"""Builds the three distributions of this tree: ``plainsong-client``, ``plainsong-server`` and ``plainsong-spark``.

    python scripts/dist.py [FOLDER]      wheels in FOLDER, by default dist, each with its SBOM (CycloneDX) next to it

Each has its own ``etc/dist/*/pyproject.toml``. The script copies the distribution's packages next to it, and runs
setuptools to build a wheel. The time in the wheels is that of the last commit, so building twice gives identical files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("client", "server", "spark")
#: The date of a wheel without a commit: the earliest time that a zip file can hold.
EPOCH = "315532800"


def build(kind: str, folder: Path) -> Path:
    """Builds one wheel into ``folder``. Raises CalledProcessError."""
    source = ROOT / "etc/dist" / kind
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    names = [each.rstrip("*") for each in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as work:
        tree, wheels = Path(work) / kind, Path(work) / "wheels"
        shutil.copytree(source, tree)
        shutil.copy(ROOT / "LICENSE", tree)
        for name in names:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels)]
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(built_s())}
        subprocess.run([*pip, *options, str(tree)], env=environ, check=True, capture_output=True, text=True)  # noqa: S603
        (wheel,) = wheels.glob("*.whl")
        return Path(shutil.copy(wheel, folder / wheel.name))


def check(kind: str, wheel: Path) -> subprocess.CompletedProcess[str]:
    """Run check-wheel-contents on a wheel, with the settings in the distribution's ``pyproject.toml``."""
    settings = ROOT / "etc/dist" / kind / "pyproject.toml"
    command = [sys.executable, "-m", "check_wheel_contents", "--config", str(settings), str(wheel)]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603


def built_s() -> int:
    """The date of a wheel and its SBOM, in seconds since 1970."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or _last_commit())


def _last_commit() -> str:
    """The time of the last commit, in seconds since 1970."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip() or EPOCH  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return EPOCH


def main() -> None:
    """The command line."""
    sys.path.insert(0, str(ROOT))
    from scripts import sbom  # its library is a development dependency, which ``build`` does not need

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    for kind in KINDS:
        try:
            wheel = build(kind, folder)
        except subprocess.CalledProcessError as failed:
            sys.exit(f"error: {kind} cannot be built\n{failed.stderr}")
        judged = check(kind, wheel)
        if judged.returncode:
            sys.exit(f"error: {judged.stdout}{judged.stderr}")
        print(wheel)
        print(sbom.write(wheel, built_s()))


if __name__ == "__main__":
    main()
