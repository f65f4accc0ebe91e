"""Pictures of a run's page for the docs: `python tools/dashboard_pictures.py URL FOLDER`.

URL is that of `nestpipe show`, of `train --dashboard`, or of a report. Needs Chromium.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.chromium import chromium

VIEWS = {
    "laptop-light": (1280, 1500, "light"),
    "laptop-dark": (1280, 1500, "dark"),
    "phone-light": (390, 1500, "light"),
    "phone-dark": (390, 1500, "dark"),
}
DRAWN = "!document.getElementById('page').hidden && document.querySelectorAll('svg').length > 7"
SETTLE_S = 0.5
MOST_BYTES = 150_000


def main(url: str, folder: Path) -> None:
    """Write a picture for each view."""
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as page:
        for name, (width, height, scheme) in VIEWS.items():
            page.resize(width, height, phone=width < 500)
            page.prefer(scheme)
            page.open(url, DRAWN)
            time.sleep(SETTLE_S)
            file = folder / f"dashboard-{name}.webp"
            page.screenshot(file)
            print(f"{file}: {file.stat().st_size:,} bytes")
            assert file.stat().st_size < MOST_BYTES
        print(*page.complaints, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
