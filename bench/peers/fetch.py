"""Installing peers: jars by Maven, NATS by Go, the others from Debian packages; under .cache, which git ignores.

Versions are pinned where a build tool resolves them: in the ``pom.xml`` and ``go.mod`` next to this file. Maven checks
each jar against its checksum (``--strict-checksums``), Go each module against ``go.sum``, apt each package against the
signed list. A Debian package has the version of its release; the report names it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.peers.peer import Lacking, is_root

HERE = Path(__file__).parent
#: Java that the projects share.
_CLIENTS = HERE / "clients"
#: Downloads and builds, kept between runs.
KEPT = HERE.parents[1] / ".cache" / "peers"
#: The Java version that the jars require.
JAVA_AT_LEAST = 17


def jars(name: str) -> str:
    """Return the class path of the project in the folder ``name``, its own classes first. Raises Lacking."""
    _java()
    source, out = HERE / name, KEPT / name
    classpath = out / "classpath"
    sources = [file for folder in (source, _CLIENTS) for file in folder.rglob("*") if file.suffix in (".java", ".xml")]
    if not classpath.exists() or any(file.stat().st_mtime > classpath.stat().st_mtime for file in sources):
        maven = _program("mvn", "Maven")
        out.mkdir(parents=True, exist_ok=True)
        unfinished = out / "classpath.unfinished"
        command = [maven, "-B", "-q", "--strict-checksums", "-f", str(source / "pom.xml"), f"-Dbuild.dir={out}"]
        command += ["compile", "dependency:build-classpath", "-Dmdep.includeScope=runtime"]
        done = subprocess.run(
            [*command, f"-Dmdep.outputFile={unfinished}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Lacking(f"Maven could not fetch its jars: {_last_line(done.stdout + done.stderr)}")
        unfinished.replace(classpath)
    return f"{out / 'classes'}:{classpath.read_text(encoding='utf-8').strip()}"


def are_fetched(*names: str) -> bool:
    """True if ``jars`` returns the class paths of these projects without downloads."""
    return all((KEPT / name / "classpath").exists() for name in names)


def java() -> str:
    """Return the Java launcher. Raises Lacking."""
    return _java()


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    launcher = shutil.which("java", path=f"{home}/bin" if home else None)
    if launcher is None:
        raise Lacking(f"there is no Java; {JAVA_AT_LEAST} or later is needed")
    done = subprocess.run([launcher, "-version"], capture_output=True, text=True, check=False)
    version = done.stderr.split('"')[1] if '"' in done.stderr else "0"
    if int(version.split(".")[0]) < JAVA_AT_LEAST:
        raise Lacking(f"Java {version} is too old; {JAVA_AT_LEAST} or later is needed")
    return launcher


def go_program(name: str, package: str) -> Path:
    """Return a program built from the module pinned in the folder ``name``. Raises Lacking."""
    program = KEPT / name / package.split("/")[-2 if package.rpartition("/")[2].startswith("v") else -1]
    pins = [HERE / name / "go.mod", HERE / name / "go.sum"]
    if not program.exists() or any(pin.stat().st_mtime > program.stat().st_mtime for pin in pins):
        go = _program("go", "Go")
        program.parent.mkdir(parents=True, exist_ok=True)
        command = [go, "build", "-mod=readonly", "-trimpath", "-o", str(program), package]
        done = subprocess.run(command, cwd=HERE / name, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Lacking(f"Go could not build it: {_last_line(done.stderr)}")
    return program


def debian_program(name: str, package: str, *places: str) -> str:
    """Return a program from a Debian package, installing it if necessary and possible. Raises Lacking."""
    found = _found(name, places)
    if found is None and is_root() and shutil.which("apt-get"):
        # RUNLEVEL=1 keeps a package from starting its service. PostgreSQL creates a cluster unless configured not to.
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        common = Path("/etc/postgresql-common/createcluster.conf")
        if package == "postgresql" and not common.exists():
            common.parent.mkdir(exist_ok=True)
            common.write_text("create_main_cluster = false\n", encoding="utf-8")
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
        for command in (["apt-get", "update", "-qq"], install):
            subprocess.run(command, env=environment, capture_output=True, check=False)
        found = _found(name, places)
    if found is None:
        raise Lacking(f"there is no {name}; Debian has it in the package {package}")
    return found


def _found(name: str, places: tuple[str, ...]) -> str | None:
    for place in places:
        for directory in sorted(Path("/").glob(place.lstrip("/")), reverse=True):
            if (directory / name).exists():
                return str(directory / name)
    return shutil.which(name)


def _program(name: str, said: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Lacking(f"there is no {said} to fetch it with")
    return found


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return (errors or lines or ["no output"])[0][:300]
