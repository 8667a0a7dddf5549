"""Output on a terminal: only text if it supports no more; and completion."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import foldercloud
import pytest

from cloudtrain import cli

CLI = [sys.executable, "-m", "cloudtrain"]
TERMINALS = {
    "colours": ({"TERM": "xterm-256color"}, True),
    "NO_COLOR": ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
    "an empty NO_COLOR": ({"TERM": "xterm-256color", "NO_COLOR": ""}, True),
    "dumb": ({"TERM": "dumb"}, False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one run, ``r1``, that has ended, on foldercloud."""
    folder = tmp_path_factory.mktemp("terminal")
    foldercloud.install(folder / "site")
    (folder / "jobs").mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "cloudtrain.toml").write_text(f'provider = "foldercloud"\n[foldercloud]\nfolder = "{folder}/jobs"\n')
    subprocess.run(
        [*CLI, "submit", "train.py", "--run-id", "r1", "--detach"],
        cwd=folder, env=environ(folder, {}), check=True, capture_output=True,
    )  # fmt: skip
    foldercloud.Provider(folder=str(folder / "jobs")).stand("r1.0", state="succeeded")
    return folder


def environ(folder: Path, extra: dict[str, str]) -> dict[str, str]:
    drop = ("NO_COLOR", "FORCE_COLOR", "TERM", "CLOUDTRAIN_", "TTY_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    return {**kept, "PYTHONPATH": str(folder / "site"), **extra}


def on_a_terminal(folder: Path, *argv: str, **extra: str) -> bytes:
    """Return everything that the command writes to its own terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*CLI, *argv], cwd=folder, env=environ(folder, extra), stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # EIO: the terminal is closed
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0, seen
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("terminal", TERMINALS)
def test_escape_sequences_are_for_a_terminal_that_wants_them(folder: Path, terminal: str) -> None:
    extra, wants = TERMINALS[terminal]
    for argv in (["pull", "r1", f"out-{terminal}"], ["list", "--help"]):
        output = on_a_terminal(folder, *argv, **extra)
        assert (b"\x1b" in output) == wants, output
        assert b"next:" in output or b"--before" in output


@pytest.mark.slow
def test_a_pipe_gets_text_alone(folder: Path) -> None:
    for argv in (["pull", "r1", "piped"], ["list", "--help"], ["--help"], ["status", "r1"], ["list"]):
        env = environ(folder, {"TERM": "xterm-256color"})
        done = subprocess.run([*CLI, *argv], cwd=folder, env=env, capture_output=True, check=True)
        assert b"\x1b" not in done.stdout + done.stderr


# ----------------------------------------------------------------------------------------------------------- completion


ASK = """
source "$1"; shift
COMP_WORDS=(cloudtrain "$@"); COMP_CWORD=$#
_cloudtrain
printf '%s\\n' "${COMPREPLY[@]}"
complete -p cloudtrain
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "cloudtrain"
    done = subprocess.run([*CLI, "completion", "bash"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([""], set(cli.VERBS)),
        (["li"], {"list"}),
        (["list", "--sta"], {"--state"}),
        (["submit", "--max-"], {"--max-runtime", "--max-wait", "--max-cost"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["submit", "tr"], set()),
    ],
)
def test_bash_completes_verbs_and_flags(script: Path, words: list[str], wanted: set[str]) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "ask", str(script), *words], capture_output=True, text=True, check=True
    )
    *found, how = done.stdout.splitlines()
    assert set(found) - {"", "--help", "-h", "--version"} >= wanted
    assert wanted or set(found) == {""}
    assert how == "complete -o default -F _cloudtrain cloudtrain"  # completes file names where no flag fits


@pytest.mark.costly
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shells_script_names_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert (err, [verb for verb in cli.VERBS if verb not in out]) == ("", [])
    assert "max-runtime" in out
    assert "parse=False" not in out
    assert "screen" not in out, "a verb's internal argument is listed as a flag"


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert '"bash"' in capsys.readouterr().err
