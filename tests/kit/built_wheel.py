"""Build the source archive and the wheel, and install the wheel into a new environment."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from jobs import Once
from pages import ROOT

FOLDERS = ("cloudtrain", "entrypoints", "examples")
NO_SOURCE = shutil.ignore_patterns("__pycache__", "*.pyc", ".cloudtrain", ".ipynb_checkpoints")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, target: Path) -> Path:
    """Build with the build back end of this environment, as `python -m build --no-isolation` does."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(target)],
        cwd=source, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(once: Once, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the source archive of this tree and the wheel built from that archive, once for all workers."""
    archive, wheel = once("wheel", lambda: [str(path) for path in build_both(tmp_path_factory.mktemp("wheel"))])
    return Path(archive), Path(wheel)


def build_both(folder: Path) -> tuple[Path, Path]:
    tree, dist = folder / "tree", folder / "dist"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=NO_SOURCE)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_it.py").touch()  # setuptools would ship it
    archive = build("sdist", tree, dist)
    with tarfile.open(archive) as file:
        file.extractall(folder / "source", filter="data")
    [source] = (folder / "source").iterdir()
    return archive, build("wheel", source, dist)


def environment_with(folder: Path, wheel: Path) -> dict[str, str]:
    """Make a new virtual environment with the wheel. It takes the dependencies from this one, and needs no index. This
    one's pip fills it, because a pip of its own takes 3 s of CPU."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    install = [*pip, "install", "-q", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, env={**os.environ, "PIP_CONSTRAINT": ""})
    places = {
        Path(str(spec.origin)).parents[1] for name in ("cyclopts", "torch") if (spec := importlib.util.find_spec(name))
    }
    [site] = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("".join(f"{place}\n" for place in sorted(places)))
    drop = re.compile(r"CLOUDTRAIN_|PYTHONPATH$|PYTEST_|VIRTUAL_ENV$")
    return {
        **{key: value for key, value in os.environ.items() if not drop.match(key)},
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
