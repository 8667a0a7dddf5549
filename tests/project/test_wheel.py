"""The wheel and the source archive: their files and metadata, and a first run by a user with only the wheel."""

from __future__ import annotations

import email
import json
import re
import shlex
import subprocess
import tarfile
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from built_wheel import FOLDERS, environment_with
from first_time_user import commands
from pages import ROOT, blocks

from cloudtrain import cli
from cloudtrain.validate import toml_loads


def files_of(*folders: str) -> set[str]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and path.suffix != ".pyc"}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(file.read(name).decode())


@pytest.mark.slow
def test_the_wheel_has_the_package_and_the_examples_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as file:
        names = [re.sub(r"^cloudtrain-[^/]*\.data/data/share/cloudtrain/", "", name) for name in file.namelist()]
    assert {name for name in names if ".dist-info/" not in name} == files_of(*FOLDERS)


@pytest.mark.slow
def test_the_archive_has_no_half_of_the_tests(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as file:
        names = {name.partition("/")[2].partition("/")[0] for name in file.getnames()} - {""}
    assert names == {
        *FOLDERS, "cloudtrain.egg-info", "pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in", "PKG-INFO",
        "README.md", "LICENSE", "CHANGELOG.md",
    }  # fmt: skip


@pytest.mark.slow
def test_the_metadata_says_what_the_project_says(built: tuple[Path, Path]) -> None:
    found, project = metadata_of(built[1]), toml_loads((ROOT / "pyproject.toml").read_text(), where="")["project"]
    assert (found["Name"], found["License-Expression"], found["License-File"]) == (
        "cloudtrain",
        "Apache-2.0",
        "LICENSE",
    )
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text()
    assert set(found.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    [tested] = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    said = [item.rpartition(" ")[2] for item in found.get_all("Classifier", []) if re.search(r":: 3\.\d+$", item)]
    assert said == json.loads(f"[{tested}]")
    assert found["Requires-Python"] == f">={said[0]}"


@pytest.mark.slow
@pytest.mark.proof
def test_the_readme_works_from_the_wheel_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Run `init --examples`, a plan of its job, and the README's first job, with the entry point and data from init."""
    environ, home = environment_with(tmp_path / "venv", built[1]), tmp_path / "home"
    home.mkdir()

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run(words, cwd=home, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    program = tmp_path / "venv/bin/cloudtrain"
    where = [tmp_path / "venv/bin/python", "-c", "import cloudtrain; print(cloudtrain.__file__)"]
    output = subprocess.run(where, cwd=home, env=environ, capture_output=True, text=True, check=True).stdout
    assert output.startswith(str(tmp_path / "venv/lib"))
    rows = {row["path"]: row["status"] for row in run(str(program), "init", "--examples", "--json")["files"]}
    assert rows == dict.fromkeys(
        [*files_of("entrypoints", "examples"), "cloudtrain.toml", "job.toml", ".cloudtrainignore"], "wrote"
    )
    assert all((home / name).read_bytes() == (ROOT / name).read_bytes() for name in files_of("entrypoints", "examples"))
    plan = run(str(program), "plan", "job.toml", "--json")
    assert plan["request"]["context"]["entry_point"] == "entrypoints/ddp.py"
    assert plan["request"]["context"]["inputs"] == {"train": {"file": "digits.csv.gz"}}
    [line] = [
        line
        for block in blocks("README.md")
        if block.language == "sh"
        for line in commands(block.text)
        if line.startswith("cloudtrain submit entrypoints/ddp.py")
    ]
    done = run(*shlex.split(line), "--max-runtime", "10m", "--json", "--", "--epochs", "1")
    assert done["state"] == "succeeded"
    assert list((home / "out" / "checkpoints").iterdir())


@pytest.mark.slow
def test_init_writes_the_examples_of_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An editable installation has the same files. A file of the user stays unchanged."""
    monkeypatch.chdir(tmp_path)
    Path("entrypoints").mkdir()
    Path("entrypoints/ddp.py").write_text("mine = 1\n")
    assert cli.main(["init", "--examples"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("kept entrypoints/ (1 file)\nwrote entrypoints/ (3 files)\nwrote examples/ (")
    assert Path("entrypoints/ddp.py").read_text() == "mine = 1\n"
    assert files_of("entrypoints", "examples") <= {path.as_posix() for path in Path().rglob("*")}
    assert cli.main(["init", "mine.py", "--examples", "--json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)["files"]} == {"kept"}
