"""``make audit``: known vulnerabilities of installed packages, and weaknesses in the workflows.

    .venv/bin/python tools/audit.py BIN

``BIN`` is the folder with pip-audit and zizmor. Exit code 0: everything was checked and nothing found. 1: something was
found. 2: a check got no answer, for example because the database of advisories is unreachable.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OWN = "cloudtrain"
WORKFLOWS = (".github/workflows/*.y*ml", "examples/*.y*ml", "examples/ci/**/*.y*ml")
SECONDS = 300
CLEAN, FOUND, UNKNOWN = 0, 1, 2


def installed() -> dict[str, str]:
    """Return the versions of all packages in this environment but cloudtrain's, without a local part (``+cpu``), which
    no database knows."""
    found = {d.metadata["Name"].lower(): d.version.partition("+")[0] for d in importlib.metadata.distributions()}
    return {name: version for name, version in sorted(found.items()) if name != OWN}


def dependencies(tool: Path) -> tuple[int, list[str]]:
    """Run pip-audit on `installed`. Return (exit code, lines)."""
    wanted = installed()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in wanted.items()))
        file.flush()
        argv = [tool, "-r", file.name, "--no-deps", "--disable-pip", "--progress-spinner", "off", "-f", "json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=SECONDS)
    return judged(wanted, done.stdout, done.stderr)


def judged(wanted: dict[str, str], out: str, err: str = "") -> tuple[int, list[str]]:
    """Return (exit code, lines) for pip-audit's JSON. It exits with 0 even if it got no answer."""
    try:
        rows: list[dict[str, Any]] = json.loads(out)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (err.strip().splitlines() or ["it printed nothing"])[-1]
        return UNKNOWN, [f"dependencies: NOT AUDITED: {last}"]
    answered = {row["name"].lower() for row in rows if "vulns" in row}
    bad = [(row, hole) for row in rows for hole in row.get("vulns", ())]
    lines = [f"{row['name']} {row['version']}: {hole['id']}{_fixed(hole)}" for row, hole in bad]
    if silent := sorted(wanted.keys() - answered):
        some = ", ".join(silent[:5]) + (", …" if len(silent) > 5 else "")
        why = f"no answer for {len(silent)} of {len(wanted)} packages ({some}): is the advisory database in reach?"
        lines.append(f"dependencies: NOT AUDITED: {why}")
    elif not lines:
        lines.append(f"dependencies: {len(wanted)} packages, no known vulnerability")
    return FOUND if bad else UNKNOWN if silent else CLEAN, lines


def _fixed(hole: dict[str, Any]) -> str:
    versions = hole.get("fix_versions") or []
    return f", fixed in {', '.join(versions)}" if versions else ", no fix yet"


def workflows(tool: Path, files: Sequence[Path]) -> tuple[int, list[str]]:
    """Run zizmor on workflow files, offline and from medium severity on. Return (exit code, lines)."""
    if not files:
        return UNKNOWN, ["workflows: NOT AUDITED: there is none"]
    argv = [tool, "--offline", "--no-progress", "--min-severity", "medium", "--format", "json", *files]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=SECONDS)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)
        lines = [f"{_place(item)}: {item['ident']}: {item['desc']}" for item in found]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return UNKNOWN, [f"workflows: NOT AUDITED: {last}"]
    if not lines and done.returncode:
        return UNKNOWN, [f"workflows: NOT AUDITED: {tool.name} ended with {done.returncode}"]
    return (FOUND, lines) if lines else (CLEAN, [f"workflows: {len(files)} files, nothing found"])


def _place(item: dict[str, Any]) -> str:
    where = item["locations"][0]
    path = next(text for text in next(iter(where["symbolic"]["key"].values())).values() if isinstance(text, str))
    return f"{Path(path).name}:{where['concrete']['location']['start_point']['row'] + 1}"


def main(argv: Sequence[str]) -> int:
    folder = Path(argv[0])
    files = sorted({path for pattern in WORKFLOWS for path in ROOT.glob(pattern) if _is_workflow(path)})
    parts = [dependencies(folder / "pip-audit"), workflows(folder / "zizmor", files)]
    for _, lines in parts:
        sys.stdout.write("\n".join(lines) + "\n")
    codes = {code for code, _ in parts}
    return FOUND if FOUND in codes else UNKNOWN if UNKNOWN in codes else CLEAN


def _is_workflow(path: Path) -> bool:
    """Return True for GitHub's workflows: zizmor does not know those of other services."""
    return "\njobs:" in path.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
