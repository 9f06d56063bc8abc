"""Builds the documents as a site, by Zensical: ``python scripts/site.py [FOLDER]``; it is in ``site`` of build, or of FOLDER.

The documents stay where they are and read as plain Markdown. The script copies them into ``documents`` next to the
site, laid out as in the tree, so that links between them work; other linked files are copied too, and links to folders
lead to the source. Zensical is strict: a broken link is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "etc/zensical.toml"
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
#: The addresses on the web, defined only here. The distributions, the site and SECURITY.md must have the same.
HOME = "https://plainsong.example"
URLS = {
    "Homepage": HOME,
    "Documentation": f"{HOME}/docs",
    "Source": f"{HOME}/source",
    "Changelog": f"{HOME}/changelog",
    "Issues": f"{HOME}/issues",
}

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])")


def gather(folder: Path) -> None:
    """Copies the documents, and the files that they link to, into ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    sources = [ROOT / name for name in DOCUMENTS] + sorted((ROOT / "docs").rglob("*.md"))
    for source in sources:
        text = source.read_text(encoding="utf-8")
        for link in set(_LINK.findall(text)):
            target = (source.parent / link).resolve()
            if urlsplit(link).scheme or target in sources or not target.is_relative_to(ROOT):
                continue
            if target.is_dir():
                text = text.replace(f"]({link})", f"]({URLS['Source']}/{target.relative_to(ROOT).as_posix()})")
            elif target.is_file():
                _copy(target, folder)
        # A title behind a block's language is written otherwise there.
        text = re.sub(r"^```(\w+) ([^\n]+)$", r'```\1 title="\2"', text, flags=re.MULTILINE)
        place = folder / source.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def _copy(target: Path, folder: Path) -> None:
    place = folder / target.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(target, place)


def config() -> str:
    """Zensical's settings: those of etc/zensical.toml, and where things are."""
    where = {"docs_dir": "documents", "site_dir": "site", "site_url": f"{URLS['Documentation']}/"}
    lines = "".join(f'{key} = "{value}"\n' for key, value in where.items())
    return CONFIG.read_text(encoding="utf-8").replace("[project]\n", f"[project]\n{lines}", 1)


def main() -> None:
    """The command line."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build").resolve()
    gather(folder / "documents")
    settings = folder / "zensical.toml"
    settings.write_text(config(), encoding="utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run([zensical, "build", "--clean", "--strict", "-f", settings], cwd=folder, check=False)  # noqa: S603
    if done.returncode == 0:
        print(f"the site is in {folder / 'site'}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
