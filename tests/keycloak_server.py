"""A real Keycloak as a process: downloaded once from Maven Central, and started on free ports with a realm.

The first start builds the server and creates its database, which takes three quarters of its test's processor time. So
that is done once, and each start uses a copy of the result.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.ports import free_ports

ROOT = Path(__file__).parents[1]
VERSION = "26.4.5"
#: Git ignores it.
CACHE = ROOT / ".cache/keycloak"
#: A start took 20 s on an idle machine, and 45 s on a busy one.
PATIENCE_S = 600.0
#: JVM options for a fast start. Keycloak's script has chosen G1 before, which a JVM would not accept with another.
QUICK_JVM = (
    "-Xmx400m -XX:TieredStopAtLevel=1 -XX:-UseG1GC -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
REALM, CLIENT, SECRET, AUDIENCE = "shop", "billing", "billing-secret", "plainsong"


def why_not() -> str | None:
    """Return the reason why Keycloak cannot run here; None if it can. Download it if necessary (153 MiB)."""
    for program, package in (("java", "openjdk-17-jre-headless"), ("mvn", "maven")):
        if shutil.which(program) is None:
            return f"NOT TESTED: Keycloak, since there is no {program} (Debian: apt-get install {package})"
    if not (CACHE / VERSION / ".complete").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        copied = ("-Dartifact=org.keycloak:keycloak-quarkus-dist:" + VERSION + ":zip", f"-DoutputDirectory={CACHE}")
        plugin = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
        done = subprocess.run(["mvn", "-B", "-ntp", "-q", plugin, *copied], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"NOT TESTED: Keycloak, since it cannot be fetched: {done.stdout[-500:]}"
        archive = CACHE / f"keycloak-quarkus-dist-{VERSION}.zip"
        shutil.rmtree(CACHE / VERSION, ignore_errors=True)
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(CACHE / "unpacked")
        (CACHE / "unpacked" / f"keycloak-{VERSION}").rename(CACHE / VERSION)
        (CACHE / VERSION / ".complete").touch()
        archive.unlink()
    return None


def prepared() -> Path:
    """Return an installation that was started once with the realm and stopped cleanly; create it if necessary."""
    realm = json.dumps(REALM_FILE)
    ready = CACHE / f"{VERSION}-{sha256(realm.encode()).hexdigest()[:16]}"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            making = CACHE / "making"
            shutil.rmtree(making, ignore_errors=True)
            shutil.copytree(CACHE / VERSION, making / "keycloak")
            (making / "keycloak/bin/kc.sh").chmod(0o755)
            imported = making / "keycloak/data/import"
            imported.mkdir(parents=True)
            (imported / "realm.json").write_text(realm)
            with Keycloak(making, making / "keycloak") as first:
                first.stop()
            (making / "keycloak").rename(ready)
            shutil.rmtree(making)
    return ready


class Keycloak:
    """One server with one realm and one client, while a ``with`` block runs."""

    def __init__(self, directory: Path, home: Path | None = None) -> None:
        """``home``: an existing installation; by default, a copy in ``directory``."""
        self.home = home or directory / "keycloak"
        if home is None:
            shutil.copytree(prepared(), self.home)
        self.port, management = free_ports(2)
        self.issuer = f"http://127.0.0.1:{self.port}/realms/{REALM}"
        self.jwks = f"{self.issuer}/protocol/openid-connect/certs"
        self._log = directory / "keycloak.log"
        self._command = [str(self.home / "bin/kc.sh"), "start-dev", "--import-realm", "--cache=local"]
        self._command += ["--http-host=127.0.0.1", f"--http-port={self.port}", f"--http-management-port={management}"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Keycloak:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ
                | {
                    "JAVA_OPTS_KC_HEAP": QUICK_JVM,
                    "KC_BOOTSTRAP_ADMIN_USERNAME": "admin",
                    "KC_BOOTSTRAP_ADMIN_PASSWORD": "admin",
                },
            )
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise TimeoutError(f"Keycloak is not ready:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def stop(self) -> None:
        """Send SIGTERM, and wait until it has closed its database."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end; do nothing the second time."""
        process, self._process = self._process, None
        if process is not None:
            # Keycloak's script starts the JVM, so kill the whole group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def token(self) -> str:
        """Return a token for the client itself, as a service would get."""
        return str(self._post(f"{self.issuer}/protocol/openid-connect/token", CLIENT, SECRET)["access_token"])

    def rotate_keys(self) -> None:
        """Add a key with a higher priority, which signs new tokens, while the old key still verifies."""
        admin = self._post(
            f"http://127.0.0.1:{self.port}/realms/master/protocol/openid-connect/token",
            "admin-cli",
            "",
            grant_type="password",
            username="admin",
            password="admin",
        )["access_token"]
        component = {
            "name": "fresh",
            "providerId": "rsa-generated",
            "providerType": "org.keycloak.keys.KeyProvider",
            "config": {"priority": ["500"], "enabled": ["true"], "active": ["true"], "algorithm": ["RS256"]},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/admin/realms/{REALM}/components",
            json.dumps(component).encode(),
            {"Authorization": f"Bearer {admin}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert answer.status == 201

    def _post(self, url: str, client: str, secret: str, **fields: str) -> Any:
        given = {"grant_type": "client_credentials", "client_id": client, "client_secret": secret, **fields}
        with urllib.request.urlopen(url, urllib.parse.urlencode(given).encode(), timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.jwks, timeout=5) as answer:
                return bool(json.loads(answer.read())["keys"])
        except (OSError, urllib.error.URLError, ValueError):
            return False


REALM_FILE = {
    "realm": REALM,
    "enabled": True,
    "accessTokenLifespan": 300,
    "clients": [
        {
            "clientId": CLIENT,
            "secret": SECRET,
            "enabled": True,
            "serviceAccountsEnabled": True,
            "standardFlowEnabled": False,
            "protocolMappers": [
                {
                    "name": "audience",
                    "protocol": "openid-connect",
                    "protocolMapper": "oidc-audience-mapper",
                    "config": {"included.custom.audience": AUDIENCE, "access.token.claim": "true"},
                },
                {
                    "name": "groups",
                    "protocol": "openid-connect",
                    "protocolMapper": "oidc-hardcoded-claim-mapper",
                    "config": {
                        "claim.name": "groups",
                        "claim.value": '["payments"]',
                        "jsonType.label": "JSON",
                        "access.token.claim": "true",
                    },
                },
            ],
        }
    ],
}
