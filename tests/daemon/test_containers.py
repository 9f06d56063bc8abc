"""The container and the Kubernetes examples: linters check them, and a daemon runs with their settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from plainsong import Client, errors
from plainsong.cli.command import Exit
from tests.certificates import Authority, Pair
from tests.daemon.harness import PLAINSONG, ROOT, Daemon, clean_environ, eventually
from tests.patience import PATIENCE_S

CONTAINERFILE = ROOT / "etc/Containerfile"
MANIFESTS = sorted((ROOT / "etc/kubernetes").glob("*.yaml"))
#: The oldest supported version, and the newest version in the schemas.
VERSIONS = ("1.34", "1.37")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a path short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="psg") as folder:
        yield Path(folder)


# --- static checks ---------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Return the Containerfile's instructions, in order."""
    lines = [line for line in CONTAINERFILE.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def last(word: str) -> str:
    return [rest for each, rest in instructions() if each == word][-1]


def image_environ() -> dict[str, str]:
    """Return the variables that the image sets, except PATH."""
    return dict(each.split("=", 1) for each in shlex.split(last("ENV")) if not each.startswith("PATH="))


def documents(manifest: Path) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(manifest.read_text(encoding="utf-8"))}


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_containerfile_passes_hadolint():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, CONTAINERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_does_not_run_as_root_and_is_asked_to_leave_by_sigterm():
    assert (last("USER"), last("STOPSIGNAL")) == ("10001:10001", "SIGTERM")
    assert json.loads(last("VOLUME")) == ["/data"]
    assert '"--live"' in last("HEALTHCHECK")


def test_the_locked_versions_are_all_that_the_wheels_in_the_image_need():
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = {name.lower() for name in re.findall(r"^([A-Za-z0-9_.-]+)==", lock, re.MULTILINE)}
    for kind in ("client", "server"):
        project = tomllib.loads((ROOT / f"etc/dist/{kind}/pyproject.toml").read_text(encoding="utf-8"))["project"]
        wanted = {Requirement(each).name.lower() for each in project["dependencies"]} - {"plainsong-client"}
        assert wanted <= locked


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: each.name)
def test_the_manifests_have_only_fields_that_kubernetes_defines(manifest, version):
    for document in documents(manifest).values():
        kubernetes_validate.validate(document, version, strict=True)


def test_an_unknown_kubernetes_field_is_found():
    workload = documents(ROOT / "etc/kubernetes/plainsong.yaml")["StatefulSet"]
    workload["spec"]["template"]["spec"]["terminationGracePeriod"] = 40
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workload, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: each.name)
def test_a_pod_has_no_privileges_and_a_user_that_is_the_images(manifest):
    workload = documents(manifest).get("StatefulSet") or documents(manifest)["Deployment"]
    pod = workload["spec"]["template"]["spec"]
    user, group = (int(each) for each in last("USER").split(":"))
    secured = pod["securityContext"]
    assert (secured["runAsUser"], secured["runAsGroup"], secured["fsGroup"]) == (user, group, group)
    assert container_of(workload)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


# --- a daemon with the settings --------------------------------------------------------------------


class Mount:
    """A ConfigMap or Secret as the kubelet mounts it: files under a link, which is replaced when the object changes."""

    def __init__(self, folder: Path, mode: int) -> None:
        self._folder, self._mode, self._number = folder, mode, 0
        folder.mkdir(parents=True)

    def lay(self, files: Mapping[str, bytes]) -> None:
        self._number += 1
        fresh = self._folder / f"..{self._number}"
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_bytes(content)
            (fresh / name).chmod(self._mode)
            if not (self._folder / name).is_symlink():
                (self._folder / name).symlink_to(Path("..data") / name)
        link = self._folder / "..fresh"
        link.symlink_to(fresh.name)
        link.rename(self._folder / "..data")


class Pod:
    """A manifest's container as a process: its settings, arguments and mounts, with a folder in place of the root."""

    def __init__(self, place: Path, workload: dict[str, Any]) -> None:
        self.place, self._workload = place, workload
        self.container = container_of(workload)
        (place / "data").mkdir()

    def at(self, text: str) -> str:
        """Replace the container's paths with local ones, and its port with a free one."""
        moved = re.sub(r"(?<![\w.])/(data|etc/plainsong)\b", rf"{self.place}/\1", text)
        return moved.replace("0.0.0.0:7420", "0.0.0.0:0")

    def mount(self, name: str) -> Mount:
        """Return a volume's mount, with the file mode from the manifest."""
        (volume,) = (each for each in self._workload["spec"]["template"]["spec"]["volumes"] if each["name"] == name)
        (mounted,) = (each for each in self.container["volumeMounts"] if each["name"] == name)
        source = volume.get("secret") or volume["configMap"]
        return Mount(Path(self.at(mounted["mountPath"])), source["defaultMode"])

    def daemon(self) -> Daemon:
        own = {each["name"]: each["value"] for each in self.container.get("env", [])}
        environ = {name: self.at(value) for name, value in (image_environ() | own).items()}
        daemon = Daemon(self.place / "data/store", environ=environ)
        (program,) = json.loads(last("ENTRYPOINT"))
        daemon.command = [str(PLAINSONG.with_name(program)), *map(self.at, self.container["args"])]
        return daemon

    def probe(self, daemon: Daemon, kind: str) -> int:
        """Send a probe as the kubelet does, by address and trusting any certificate; return the status."""
        asked = self.container[kind]["httpGet"]
        url = f"{asked.get('scheme', 'HTTP').lower()}://127.0.0.1:{daemon.address[1]}{asked['path']}"
        anything = ssl._create_unverified_context()
        with urllib.request.urlopen(
            url, timeout=PATIENCE_S, context=anything if url.startswith("https") else None
        ) as answer:
            return int(answer.status)

    def health(self, daemon: Daemon) -> subprocess.CompletedProcess[str]:
        """Run the image's health check."""
        _, _, command = last("HEALTHCHECK").partition("CMD ")
        program, *arguments = json.loads(command)
        here = [str(PLAINSONG.with_name(program)), *map(self.at, arguments)]
        return subprocess.run(
            here, env=clean_environ(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )


def tokens(file: Path, *command: str) -> str:
    whole = [str(PLAINSONG), "token", *command, "--file", str(file)]
    return subprocess.run(whole, capture_output=True, text=True, check=True, env=clean_environ()).stdout.strip()


def test_the_stateful_set_starts_with_names_and_tls_from_its_mounts_and_accepts_a_publish(place):
    found = documents(ROOT / "etc/kubernetes/plainsong.yaml")
    pod = Pod(place, found["StatefulSet"])
    authority = Authority(place)
    pair: Pair = authority.issue("server", "localhost", "plainsong.default.svc")
    file = place / "tokens.json"
    operator = tokens(file, "create", "--name", "operator", "--expires", "1d")
    pod.mount("config").lay({name: pod.at(text).encode() for name, text in found["ConfigMap"]["data"].items()})
    pod.mount("tls").lay({"tls.crt": pair.certificate.read_bytes(), "tls.key": pair.key.read_bytes()})
    secret = pod.mount("tokens")
    secret.lay({"tokens.json": file.read_bytes()})
    with pod.daemon() as daemon:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert pod.probe(daemon, kind) == 200
        assert pod.health(daemon).stdout.endswith("alive\n")
        url, ca = f"https://localhost:{daemon.address[1]}", str(authority.file)
        with Client(url, ca_file=ca) as stranger, pytest.raises(errors.Unauthenticated):
            stranger.create_topic("orders")
        with Client(url, ca_file=ca, token=operator) as client:
            client.create_topic("orders")
            with client.transaction():
                client.publish("orders", [b"one", b"two"])
            assert [message.payload for message in client.read("orders")] == [b"one", b"two"]

            # A changed Secret takes effect while the daemon runs.
            tokens(file, "revoke", "--name", "operator", "--yes")
            secret.lay({"tokens.json": file.read_bytes()})

            def refused() -> bool:
                try:
                    client.publish("orders", b"three")
                except errors.Unauthenticated:
                    return True
                return False

            eventually("the revoked token is refused", refused)
        assert daemon.stop() == Exit.OK


def test_the_daemon_of_the_stateful_set_refuses_a_key_that_everyone_may_read(place):
    found = documents(ROOT / "etc/kubernetes/plainsong.yaml")
    pod = Pod(place, found["StatefulSet"])
    modes = {
        volume["name"]: (volume.get("secret") or volume["configMap"])["defaultMode"]
        for volume in found["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
    }
    assert modes == {"config": 0o444, "tls": 0o440, "tokens": 0o440}
    pair = Authority(place).issue("server", "localhost")
    file = place / "tokens.json"
    tokens(file, "create", "--name", "operator", "--expires", "1d")
    pod.mount("config").lay({name: pod.at(text).encode() for name, text in found["ConfigMap"]["data"].items()})
    Mount(place / "etc/plainsong/tls", 0o444).lay(
        {"tls.crt": pair.certificate.read_bytes(), "tls.key": pair.key.read_bytes()}
    )
    Mount(place / "etc/plainsong/tokens", 0o444).lay({"tokens.json": file.read_bytes()})
    daemon = pod.daemon()
    daemon.spawn()
    assert daemon.wait() == Exit.USAGE
    assert "can be read by all users" in daemon.errors
    daemon.end()


def test_the_trial_example_names_what_it_lacks_and_accepts_a_publish(place):
    manifest = ROOT / "etc/kubernetes/trying.yaml"
    assert manifest.read_text(encoding="utf-8").startswith("# FOR TRIALS ONLY")
    pod = Pod(place, documents(manifest)["Deployment"])
    with pod.daemon() as daemon:
        assert [pod.probe(daemon, kind) for kind in ("readinessProbe", "livenessProbe")] == [200, 200]
        daemon.wait_for_line("reachable without authentication")
        with Client(f"http://127.0.0.1:{daemon.address[1]}") as client:
            client.create_topic("orders")
            client.publish("orders", b"one")
            assert [message.payload for message in client.read("orders")] == [b"one"]
        assert daemon.stop() == Exit.OK


def test_the_image_does_not_start_without_grants(place):
    environ = {name: value.replace("/data", str(place)) for name, value in image_environ().items()}
    program = [str(PLAINSONG.with_name("plainsong-server")), *json.loads(last("CMD"))]
    done = subprocess.run(
        program,
        env={**clean_environ(), **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=place,
    )
    assert done.returncode == Exit.USAGE
    assert "without authentication and without TLS" in done.stderr
    assert os.listdir(place) == []
