"""Make the pictures of docs/images: a report and the calculator page, in a headless Chromium.

Run: scripts/pictures    needs chromium with its driver, and the extra [web]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))
REPORT = (
    "report meta-llama/Llama-3.1-8B --method qlora --max-length 2048 --tokens 10M "
    "--gpu l40s --gpu rtx-4090 --gpu a100-sxm4-80gb --gpu h100-sxm5-80gb"
)
"""What docs/report.md says it shows."""
PORT = 7871
LINK = f"http://127.0.0.1:{PORT}/?model=meta-llama%2FLlama-3.1-8B&method=qlora&gpu=l40s-48gb%2Crtx-4090-24gb&tokens=10M"
STARTS_WITHIN_S = 60.0
SETTLES_S = 2.0


def report_pictures() -> None:
    """The report, wide and narrow."""
    from browser import browser

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "tunecast-report.html"
        subprocess.run([sys.executable, "-m", "tunecast", *REPORT.split()], check=True, cwd=folder)
        for name, width, height in (("report.png", 1000, 1500), ("report-narrow.png", 500, 1500)):
            with browser(width, height) as session:
                session.open(page.as_uri())
                written(IMAGES / name, session.screenshot())


def wait_for(url: str) -> None:
    """Until the server answers."""
    end = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < end:
        try:
            urlopen(url, timeout=2).close()
            return
        except (URLError, OSError):
            time.sleep(0.5)
    sys.exit(f"{url} does not answer")


def web_pictures() -> None:
    """The calculator page, wide and narrow, opened by a link that holds its inputs."""
    from browser import browser

    command = [sys.executable, "-m", "tunecast", "web", "--port", str(PORT)]
    environment = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        wait_for(f"http://127.0.0.1:{PORT}/")
        for name, width, height in (("web.png", 1280, 1050), ("web-narrow.png", 500, 1500)):
            with browser(width, height) as page:
                page.open(LINK)
                page.wait_for("document.querySelector('#answer table')")
                time.sleep(SETTLES_S)
                if width < 1000:  # the answer, which is below the form there
                    page.run("document.querySelector('#answer').scrollIntoView();")
                    time.sleep(SETTLES_S)
                written(IMAGES / name, page.screenshot())
    finally:
        server.terminate()
        server.wait(timeout=20)


def written(target: Path, picture: bytes) -> None:
    """One picture as a file."""
    target.write_bytes(picture)
    print(f"{target.name}: {len(picture) // 1000} kB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    IMAGES.mkdir(parents=True, exist_ok=True)
    report_pictures()
    web_pictures()
