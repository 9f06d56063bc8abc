"""Looks up every locked dependency in the database of known vulnerabilities (``make audit``, and part of ``make check``).

    python scripts/audit.py

It runs pip-audit in a separate environment below ``.cache``, installed from ``requirements-audit.lock``. The exit
status is 1 if a vulnerability is known. If the database cannot be reached, it prints a warning, and the status is 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from scripts.locked import ROOT, installed


def main() -> int:
    """Audit every lock file, and return the exit status."""
    python = installed("audit")
    if python is None:
        print("NOT AUDITED: pip-audit could not be installed; see the lines above", file=sys.stderr)
        return 0
    status = 0
    for lock in sorted(ROOT.glob("requirements*.lock")):
        command = [
            python.with_name("pip-audit"),
            "-r",
            lock,
            "--disable-pip",
            "--require-hashes",
            "-f",
            "json",
            "--progress-spinner",
            "off",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
        try:
            dependencies = json.loads(done.stdout)["dependencies"]
        except (ValueError, KeyError):
            print(
                f"NOT AUDITED: {lock.name}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}", file=sys.stderr
            )
            continue
        lines, is_vulnerable = judged(lock.name, dependencies)
        for line in lines:
            print(line, file=sys.stderr)
        status = status or int(is_vulnerable)
    return status


def judged(lock: str, dependencies: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the report on one lock file, and True if a vulnerability is known.

    Args:
      dependencies: as pip-audit lists them: each with ``name``, ``version`` and ``vulns``, or with a ``skip_reason``.
    """
    skipped = [each for each in dependencies if "skip_reason" in each]
    lines = []
    for each in dependencies:
        for known in each.get("vulns", ()):
            fixed = ", ".join(known.get("fix_versions", ())) or "no version yet"
            lines.append(f"VULNERABLE: {lock}: {each['name']} {each['version']}: {known['id']}, fixed in {fixed}")
    is_vulnerable = bool(lines)
    if skipped and len(skipped) == len(dependencies):
        lines.append(f"NOT AUDITED: {lock}: none of its {len(skipped)} dependencies is in the database")
    elif skipped:
        lines.append(f"NOT AUDITED: {lock}: {', '.join(each['name'] for each in skipped)}")
    if not lines:
        lines.append(f"{lock}: no known vulnerability in {len(dependencies)} dependencies")
    return lines, is_vulnerable


if __name__ == "__main__":
    sys.exit(main())
