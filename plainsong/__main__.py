"""``python -m plainsong`` is the program ``plainsong``."""

from __future__ import annotations

from plainsong.cli.start import main

if __name__ == "__main__":
    main()
