"""A bare installation of a clone: each provider's first command names one command that installs its packages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.storage.extras import extra_of, install_command, missing_packages, not_installed

ROOT = Path(__file__).parents[2]
EXTRAS = {
    "local": ["numpy", "torch"],
    "docker": ["docker"],
    "sagemaker": ["boto3", "obstore"],
    "azureml": ["azure-ai-ml", "azure-identity", "obstore"],
    "vertex": ["gcsfs", "google-cloud-aiplatform", "requests"],
}
FIRST = {
    "local": "submit train.py --nproc-per-node 2",
    "docker": "doctor docker",
    "sagemaker": "submit train.py --provider sagemaker --store s3://b/x --set region=eu-west-1"
    " --set role=arn:aws:iam::123456789012:role/T",
    "azureml": "submit train.py --provider azureml --store abfs://c@account.dfs.core.windows.net/x --image i:1"
    " --set subscription_id=s --set resource_group=g --set workspace_name=w",
    "vertex": "submit train.py --provider vertex --store gs://b/x --image i:1 --set project=my-project"
    " --set location=europe-west4",
}


def test_a_message_names_every_package_and_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.storage.extras.missing_packages", lambda extra: ["boto3", "obstore", "requests"])
    error = not_installed("provider sagemaker", "sagemaker", field="")
    assert str(error) == "provider sagemaker needs boto3, obstore and requests, which are not installed"
    assert re.search(r"pip install .*\[sagemaker\]'$", error.hint)
    assert "pip install" not in str(error)


@pytest.mark.parametrize(
    ("told", "command"),
    [
        ({"dir_info": {"editable": True}, "url": ROOT.as_uri()}, f"install -e '{ROOT}[vertex]'"),
        ({"dir_info": {}, "url": ROOT.as_uri()}, f"install '{ROOT}[vertex]'"),
        ({"dir_info": {}, "url": "file:///is/gone"}, "install 'cloudtrain[vertex]'"),
        (
            {"vcs_info": {"vcs": "git", "commit_id": "c0ffee"}, "url": "https://h/r"},
            "[vertex] @ git+https://h/r@c0ffee'",
        ),
        ({"archive_info": {}, "url": "file:///is/gone.whl"}, "install 'cloudtrain[vertex]'"),
        ({"archive_info": {}, "url": "https://h/w.whl"}, "install 'cloudtrain[vertex] @ https://h/w.whl'"),
        (None, "install 'cloudtrain[vertex]'"),
    ],
)
def test_the_command_installs_from_where_this_came(
    told: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        requires = ()

        def read_text(self, name: str) -> str | None:
            return json.dumps(told) if told is not None else None

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    assert install_command("vertex").endswith(command)


@pytest.mark.parametrize(
    ("prefix", "file", "extra", "packages"),
    [
        ("tools/cloudtrain", "uv-receipt.toml", "uv tool install --force {}[vertex] @ {}'", "--with sftp {} @ {}'"),
        ("venvs/cloudtrain", "pipx_metadata.json", "pipx install --force {}[vertex] @ {}'", "inject cloudtrain sftp"),
        ("archive-v0/x", "pyvenv.cfg", "uvx --from {}[vertex] @ {}' cloudtrain", "uvx --with sftp --from {} @"),
    ],
)
def test_the_command_is_that_of_the_tool_that_installed_this(
    prefix: str, file: str, extra: str, packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / prefix).mkdir(parents=True)
    (tmp_path / prefix / file).touch()
    told = {"archive_info": {}, "url": "https://h/w.whl"}
    installed = type("Installed", (), {"requires": (), "read_text": lambda self, name: json.dumps(told)})
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: installed())
    monkeypatch.setattr("sys.prefix", str(tmp_path / prefix))
    assert install_command("vertex") == extra.format("'cloudtrain", told["url"])
    assert packages.format("'cloudtrain", told["url"]) in install_command("", ["sftp"])


def test_a_package_comes_with_the_smallest_extra() -> None:
    assert [extra_of(name) for name in ("boto3", "azure-identity", "gcsfs", "docker")] == [
        "sagemaker",
        "azureml",
        "vertex",
        "docker",
    ]
    assert extra_of("no-such-package") == extra_of("paramiko") == ""
    assert missing_packages("no-such-extra") == []


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with a clone without extras. A script is in the folder ``code``."""
    folder = tmp_path_factory.mktemp("bare")
    clone = folder / "my clone"
    shutil.copytree(ROOT / "cloudtrain", clone / "cloudtrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (folder / "code").mkdir()  # not in the environment, whose files a plan would digest
    (folder / "code/train.py").write_text("print('hello')\n")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    done = subprocess.run([python, "-m", "pip", "install", "-q", clone], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-300:]}")
    return Path(python)


def cloudtrain(python: Path, line: str) -> str:
    """Return the command's output, with no cloudtrain but the installed one."""
    folder = python.parents[2]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "AWS_EC2_METADATA_DISABLED": "true"}
    done = subprocess.run(
        [python, "-m", "cloudtrain", *line.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder / "code",
        env=environ,
    )
    return done.stdout + done.stderr


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("provider", FIRST)
def test_the_first_command_names_all_that_is_missing(provider: str, bare: Path) -> None:
    output = cloudtrain(bare, FIRST[provider])
    listed = " and ".join(filter(None, [", ".join(EXTRAS[provider][:-1]), EXTRAS[provider][-1]]))
    assert f"needs {listed}, which" in output, output
    assert output.count("pip install") == 1, output
    assert f"pip install '{bare.parents[2]}/my clone[{provider}]'" in output


@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("provider", ["local", "sagemaker"])
def test_that_command_is_all_it_takes(provider: str, bare: Path) -> None:
    output = cloudtrain(bare, FIRST[provider])
    found = re.search(r"^(?:hint|\s+fix): (.*pip install.*)$", output, re.MULTILINE)
    assert found is not None, output
    subprocess.run(["sh", "-c", f"{found[1]} -q"], check=True, cwd=bare.parents[2])
    again = cloudtrain(bare, FIRST[provider] if provider == "local" else f"doctor {FIRST[provider][7:]}")
    assert "not installed" not in again
    assert ("succeeded" if provider == "local" else "ok       sdk: ") in again, again
