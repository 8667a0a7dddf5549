"""The pictures in docs/watching.md: ``python tools/screenshots.py``. Needs chromium, and a minute.

The runs are those of that page: its script, which is killed once and resumes, and the one that fails. A browser opens
the pages that `report` writes, so a picture cannot differ from the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/kit"))

from pages import blocks  # noqa: E402  what a page tells to run is read in one place

PAGE = "docs/watching.md"
#: Picture of each run, and its width and height in pixels.
SHOTS = {"seen-1": ("report-resumed.png", 1060, 855), "seen-2": ("report-failed.png", 900, 790)}
LARGEST = 100 * 1024


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.stderr.write("screenshots: chromium is not installed\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name:
        folder = Path(name)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("CLOUDTRAIN_")}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        for block in blocks(PAGE):
            if file := block.value("file"):
                (folder / file).write_text(block.text, encoding="utf-8")
            elif block.run:
                done = subprocess.run(["sh", "-e"], cwd=folder, env=environ, input=block.text, text=True, check=False)
                if done.returncode != int(block.value("exit") or 0):  # a picture would then differ from the page
                    sys.stderr.write(f"screenshots: {block.where} ended with {done.returncode}; no picture is made\n")
                    return 1
        for run, (picture, width, height) in SHOTS.items():
            target = ROOT / "docs" / "images" / picture
            subprocess.run(
                [
                    browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
                    f"--screenshot={target}", (folder / f"{run}.html").as_uri(),
                ],
                check=True, capture_output=True, timeout=120,
            )  # fmt: skip
            if target.stat().st_size > LARGEST:
                sys.stderr.write(f"screenshots: {target.name} is larger than {LARGEST} bytes\n")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
