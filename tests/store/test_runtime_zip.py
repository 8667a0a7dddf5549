"""cloudtrain.pyz: one digest for one version, and a node side that needs only the standard library."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.provider_api.node import PROTOCOL
from cloudtrain.provider_api.registry import provider_names
from cloudtrain.store import runtime_zip

PACKAGE = Path(cloudtrain.__file__).parent


def python(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60, check=False, **kwargs)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    path = tmp_path / "cloudtrain.pyz"
    path.write_bytes(runtime_zip.build())
    return path


def copy_of_the_package(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "cloudtrain", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


CODE = "import sys, hashlib; sys.path.insert(0, sys.argv[1]); from cloudtrain.store import runtime_zip as z; print(z.digest(), hashlib.sha256(z.build()).hexdigest(), z.__file__)"  # noqa: E501


@pytest.mark.slow
def test_digest_and_bytes_are_the_same_in_every_process_and_whatever_the_dates(tmp_path: Path) -> None:
    copy = copy_of_the_package(tmp_path / "other place")
    for number, path in enumerate(sorted(copy.rglob("*.py"))):
        os.utime(path, (10**9 + number, 10**9 + number))
        path.chmod(0o600)
    here = python("-c", CODE, str(PACKAGE.parent), env={**os.environ, "PYTHONHASHSEED": "1"}).stdout.split()
    there = python("-c", CODE, str(copy), env={**os.environ, "PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo"}).stdout.split(
        " ", 2
    )
    assert there[2].strip() == str(copy / "cloudtrain" / "store" / "runtime_zip.py")
    assert here[:2] == there[:2]
    assert here[0] == runtime_zip.digest()


@pytest.mark.costly
def test_another_byte_is_another_digest(tmp_path: Path) -> None:
    copy = copy_of_the_package(tmp_path)
    with open(copy / "cloudtrain" / "runtime" / "cause.py", "a") as stream:
        stream.write("# one more line\n")
    assert python("-c", CODE, str(copy)).stdout.split()[0] != runtime_zip.digest()


def test_dates_are_fixed_and_the_client_half_stays_at_home(built: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert len(names) == len(set(names))
    assert "__main__.py" in names
    assert "cloudtrain/runtime/worker.py" in names
    assert "cloudtrain/providers/local.py" in names
    assert not [n for n in names if n.startswith(("cloudtrain/cli/", "cloudtrain/testing/")) or "__pycache__" in n]
    assert len(runtime_zip.build()) < 1 << 20


@pytest.mark.costly
def test_it_runs_isolated_and_without_site(built: Path, tmp_path: Path) -> None:
    done = python("-I", "-S", str(built), "run", "--context", str(tmp_path / "none.json"), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("cloudtrain: this node cannot start: ")
    assert len(done.stderr.splitlines()) == 1
    assert python("-I", "-S", str(built)).returncode == 2


def test_a_context_of_another_version_is_refused_in_one_line(built: Path, tmp_path: Path) -> None:
    (tmp_path / "context.json").write_text(json.dumps({"protocol": 99}))
    done = python("-I", "-S", str(built), "run", "--context", str(tmp_path / "context.json"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "protocol 99" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.costly
def test_the_node_side_imports_nothing_but_the_standard_library(built: Path) -> None:
    """Test also with a full site-packages: -I keeps it on sys.path, and still no module of it is imported."""
    code = """
import importlib, json, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import cloudtrain.runtime.__main__, cloudtrain.providers
from cloudtrain.provider_api.registry import find_provider
for module in pkgutil.iter_modules(importlib.import_module("cloudtrain.runtime").__path__):
    if module.name != "worker":
        importlib.import_module("cloudtrain.runtime." + module.name)
for module in pkgutil.iter_modules(cloudtrain.providers.__path__):
    if module.name != "_cloud":  # what three of them share
        find_provider(module.name)
tops = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
files = sorted(m.__file__ for n, m in sys.modules.items() if n.startswith("cloudtrain") and m.__file__)
print(json.dumps([sorted(tops), files]))
"""
    for flags in (("-I", "-S"), ("-I",)):
        done = python(*flags, "-c", code, str(built))
        assert done.returncode == 0, done.stderr
        tops, files = json.loads(done.stdout)
        # Ignore modules that .pth files of this environment's site-packages import before any code runs.
        bare = python(*flags, "-c", "import sys; print(*{n.partition('.')[0] for n in sys.modules})").stdout.split()
        assert set(tops) - set(bare) <= {"cloudtrain"}
        assert files
        assert all(name.startswith(str(built)) for name in files)


def test_the_zip_imports_where_only_it_is(built: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(built.read_bytes())) as archive:
        source = archive.read("cloudtrain/runtime/worker.py")
    # The shim is read out of the zip as a separate file.
    assert source == (PACKAGE / "runtime" / "worker.py").read_bytes()
    code = "import sys; sys.path.append(sys.argv[1]); from cloudtrain.runtime.workspace import _source_of; sys.stdout.buffer.write(_source_of('worker.py'))"  # noqa: E501
    assert python("-I", "-S", "-c", code, str(built)).stdout.encode() == source


@pytest.mark.costly
def test_a_script_on_a_node_can_import_every_public_name(built: Path) -> None:
    """And what submits a job. The client's other packages are not needed before they are used."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import cloudtrain, cloudtrain.runs.fallback, cloudtrain.runs.reconcile
print(*(getattr(cloudtrain, name) for name in cloudtrain.__all__))
"""
    done = python("-I", "-S", "-c", code, str(built))
    assert done.returncode == 0, done.stderr


STUCK = """
import threading
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
pool.submit(threading.Event().wait)
print("said", end="")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "code", "last"),
    [
        ('{"protocol": 99}', 1, "cloudtrain: this node cannot start: "),
        ("[]", 1, "cloudtrain: this node cannot start: context: "),
        ("{}", 1, "cloudtrain: this node cannot start: context: context of protocol None"),
        (f'{{"protocol": {PROTOCOL}, "provider": 3}}', 1, "AttributeError: "),
        (None, 2, "cloudtrain.pyz: error: "),
    ],
)
def test_a_thread_that_never_ends_does_not_keep_the_node(
    built: Path, tmp_path: Path, context: str | None, code: int, last: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    (tmp_path / "context.json").write_text(context or "")
    arguments = ["--context", str(tmp_path / "context.json")] if context else []
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = python(str(built), "run", *arguments, env={**buffered, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (code, "said")
    assert done.stderr.splitlines()[-1].startswith(last)


@pytest.mark.slow
@pytest.mark.parametrize("name", provider_names())
def test_nothing_that_a_node_imports_is_compiled_there(built: Path, name: str) -> None:
    """Compiling would cost a node more than all other work before its ranks."""
    code = (
        "import sys, zipfile; sys.path.insert(0, sys.argv[1])\n"
        "import cloudtrain.runtime.__main__\n"
        "from cloudtrain.provider_api.registry import find_provider\n"
        "assert callable(find_provider(sys.argv[2]).node_environment)\n"
        "names = zipfile.ZipFile(sys.argv[1]).namelist()\n"
        "files = [m.__file__.partition('.pyz/')[2] for n, m in sys.modules.items() if n.startswith('cloudtrain')]\n"
        "print(len(files) > 10, [f for f in files if f + 'c' not in names and not f.endswith('c')])\n"
    )
    assert python("-I", "-S", "-c", code, str(built), name).stdout.strip() == "True []"
