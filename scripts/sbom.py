"""Writes a wheel's bill of materials, as CycloneDX 1.6, next to it; ``make dist`` calls it for each wheel.

The versions are those of this environment, which is installed from the lock files. Time and serial number are derived
from the last commit and the wheel, so writing it twice gives identical files.
"""

from __future__ import annotations

import hashlib
import tomllib
import zipfile
from datetime import UTC, datetime
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path
from uuid import NAMESPACE_OID, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: Distributions of this tree: their parts are in SBOMs of their own, and what they need is in all that need them.
OURS = "plainsong-"


def write(wheel: Path, time_s: int) -> Path:
    """Writes the SBOM of a wheel next to it, under the wheel's name with ``.cdx.json``.

    Args:
      time_s: when it was made, in seconds since 1970.
    Raises:
      PackageNotFoundError: this environment does not have what the wheel needs.
    """
    content = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    digest = hashlib.sha256(content).hexdigest()
    root = Component(
        name=metadata["Name"],
        version=metadata["Version"],
        type=ComponentType.APPLICATION if metadata["Name"] == "plainsong-server" else ComponentType.LIBRARY,
        bom_ref=metadata["Name"],
        description=metadata["Summary"],
        licenses=[LicenseFactory().make_from_string(metadata["License-Expression"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    bom = Bom()
    bom.serial_number = uuid5(NAMESPACE_OID, f"{wheel.name} {digest}")
    bom.metadata.timestamp = datetime.fromtimestamp(time_s, UTC)
    bom.metadata.component = root
    known: dict[str, Component] = {}
    waiting = [(root, each) for each in metadata.get_all("Requires-Dist", [])]
    while waiting:
        parent, text = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        is_new = name not in known
        if is_new:
            installed = None if name.startswith(OURS) else distribution(name)
            known[name] = _component(name, str(metadata["Version"]), installed)
            bom.components.add(known[name])
            waiting += [(known[name], each) for each in _needs(name, installed)]
        bom.register_dependency(parent, [known[name]])
    path = wheel.with_suffix(".cdx.json")
    path.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n", encoding="utf-8")
    return path


def _needs(name: str, installed: Distribution | None) -> list[str]:
    """The requirements of a distribution; for one of ours, those declared where its wheel is made."""
    if installed is not None:
        return installed.requires or []
    source = Path(__file__).resolve().parents[1] / "etc/dist" / name.removeprefix(OURS) / "pyproject.toml"
    return list(tomllib.loads(source.read_text(encoding="utf-8"))["project"]["dependencies"])


def _component(name: str, version: str, installed: Distribution | None) -> Component:
    if installed is None:
        return Component(name=name, version=version, bom_ref=name)
    expression = installed.metadata.get("License-Expression")
    return Component(
        name=name,
        version=installed.version,
        bom_ref=name,
        purl=PackageURL("pypi", None, name, installed.version),
        licenses=[LicenseFactory().make_from_string(expression)] if expression else [],
    )
