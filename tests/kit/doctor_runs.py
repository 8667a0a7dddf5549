"""``cloudtrain doctor --json`` in this process, and its checks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cloudtrain import cli
from cloudtrain.provider_api.checks import STATUSES

__all__ = ["Examined", "Examiner", "examiner"]


@dataclass(frozen=True)
class Examined:
    """The result of one doctor command. ``code`` is the exit code. ``rows`` has the checks by name; of several with one
    name, the last."""

    code: int
    rows: dict[str, dict[str, Any]]
    names: list[str] = field(default_factory=list)

    def status(self, name: str) -> str:
        return str(self.rows[name]["status"])

    def failed(self, name: str, *words: str, fix: str, code: int) -> None:
        """Check that this check failed, with these words in its line and ``fix`` in its fix."""
        row = self.rows[name]
        assert (row["status"], row["exit_code"]) == ("failed", code), row
        missing = [word for word in words if word not in row["detail"]]
        assert not missing, (missing, row)
        assert fix in row["fix"], row
        assert "\n" not in row["detail"]

    def failure(self, name: str, *words: str, fix: str, code: int) -> None:
        """Check the same, and that no other check failed."""
        assert [key for key, row in self.rows.items() if row["status"] == "failed"] == [name], self.rows
        self.failed(name, *words, fix=fix, code=code)
        assert self.code == code


@dataclass
class Examiner:
    """A folder with a cloudtrain.toml."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def settings(self, provider: str, store: str, table: dict[str, Any], **general: Any) -> None:
        data = {"provider": provider, "store": store, **general, provider: table}
        (self.folder / "cloudtrain.toml").write_text(tomli_w.dumps(data))

    def __call__(self, *argv: str) -> Examined:
        self.capsys.readouterr()
        code = cli.main(["doctor", *argv, "--json"])
        out, _ = self.capsys.readouterr()
        output = json.loads(out)
        assert output["exit_code"] == code
        rows = output.get("checks") or []
        for row in rows:
            assert row["status"] in STATUSES
            assert bool(row["fix"]) == (row["status"] == "failed"), row
        return Examined(code, {row["name"]: row for row in rows}, [row["name"] for row in rows])


@pytest.fixture
def examiner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Examiner:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Examiner(folder, capsys)
