"""Run the cells of the portability matrix, record them in docs/data/portability.json, and make docs/portability.md.

python proof/portability.py                   # all cells, an hour on 2 cores; needs an engine of containers, and root
python proof/portability.py vertex 'full disk'  # the cells whose names contain one of the words
python proof/portability.py --page            # only make the page from the record
"""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
from cells import CELLS, CLOUDS, FIXTURES, IMAGES, NOT, PROVIDERS, SCENARIOS, SHAPE, TRAININGS, Cell

from proof import commit, machine

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "docs/data/portability.json", ROOT / "docs/portability.md"
OTHER_MACHINE = f"no clean run on {PROVIDERS[0]} of the same machine to compare with"
ELSEWHERE = f"ran on a machine with another processor, and has the bits of the clean run on {PROVIDERS[0]} there"
_INTRO = """# Portability: the same job on eight platforms, with faults

<!-- Made of docs/data/portability.json by: python proof/portability.py. Do not edit. -->

Each cell runs the same job file with the same code and data. `local` starts processes, `docker` containers, and `slurm`
the real daemons of Slurm on one machine. The other columns are rehearsals: they start in containers what the platform
would start for the planned request ([rehearse.md](rehearse.md)). Nothing here ran on a cloud. Of {run} cells, {passed}
gave the expected result.
"""
_TRAININGS = """
## Training

Each job trains on the CPU with 2 nodes of 2 processes each, with an unchanged entry point
([entrypoints.md](entrypoints.md)). A cell shows the loss of the last step. **=** means that the losses of all steps,
over all attempts, are bit for bit those of the clean run on `local`. A fault strikes after the first checkpoint, which
is saved at step 10.
"""
_IMAGES = """
## Images

Each job has 2 nodes and uses an image of `tests/images`, without torch. Every node reads an input and leaves an
artifact and its part of a checkpoint.
"""
_FIXTURES = """
## Other faults

These cells run the training with `ddp.py` again. The losses must have the same bits as above.
"""
_END = """
## How old this is

`python proof/portability.py` runs all cells again, and so does `make proof`. A test fails in three cases: this page
does not agree with its record; a provider, scenario, image or fault has no cell; or a cell's entry point, task, data,
flags or image has changed since it ran. A change of cloudtrain, of a comment or of a docstring alone does not make a
cell stale. The table shows the commit of each cell, and the suite runs a few of the cells every time.
"""


def main(argv: Sequence[str]) -> int:
    """Run the chosen cells. Return 0 if each gave the expected result."""
    if list(argv) == ["--page"]:
        PAGE.write_text(page(read()), encoding="utf-8")
        return 0
    words = [word for word in argv if word != "--new"]
    chosen = [cell for cell in CELLS.values() if not words or any(word in cell.name for word in words)]
    if "--new" in argv:
        chosen = [cell for cell in chosen if wrong(read(), cell) or read()[cell.name]["job"] != cells.job_digest(cell)]
    failed = run(chosen)
    print(f"{len(chosen) - failed} of {len(chosen)} gave the expected result")
    return 1 if failed else 0


def run(chosen: Sequence[Cell]) -> int:
    """Run the cells one after the other and record each as it ends. Return how many failed."""
    wholes: dict[str, str] = {}
    for cell in chosen:
        record = read()
        with_it = {"commit": commit(ignored=(RECORD, PAGE)), "job": cells.job_digest(cell), **_machine()}
        folder = Path(tempfile.mkdtemp(prefix="ct-cell-"))
        began = datetime.datetime.now(datetime.timezone.utc)
        try:
            found = cells.run(cell, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        record[cell.name] = {"began": f"{began:%Y-%m-%d %H:%M}", **with_it, **found}
        if cell.kind != "image" and wrong(record, cell) == OTHER_MACHINE:
            record[cell.name]["whole"] = wholes.get(cell.script) or _whole(cell.script)
            wholes[cell.script] = record[cell.name]["whole"]
        record = {name: record[name] for name in CELLS if name in record}
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(record), encoding="utf-8")
        print(f"{cell.name}: {wrong(record, cell) or 'as expected'} ({found['seconds']} s)", flush=True)
    record = read()
    return sum(bool(wrong(record, cell)) for cell in chosen)


def _whole(script: str) -> str:
    """Return the digest of the losses of the clean run on ``local``, on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="ct-cell-"))
    try:
        return str(cells.run(CELLS[f"{script} clean/{PROVIDERS[0]}"], folder).get("curve"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read() -> dict[str, Any]:
    """Read the record: one table for each cell; empty before the first run."""
    return dict(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.exists() else {}


def _machine() -> dict[str, str]:
    """Name what decides the bits: the processor's vector instructions, and not the kernel."""
    import torch

    here, vectors = machine(), torch.backends.cpu.get_cpu_capability()
    hardware = f"{here['machine'].rpartition(', ')[0]} with {vectors}, {platform.system()}"
    return {"machine": hardware, "python": here["python"], "torch": here["torch"]}


def wrong(record: Mapping[str, Any], cell: Cell) -> str:
    """Say what is wrong with a cell of the record; empty if nothing is."""
    if cell.name not in record:
        return "not run yet"
    found = record[cell.name]
    if found["wrong"] or cell.kind == "image":
        return str(found["wrong"])
    whole = record.get(f"{cell.script} clean/{PROVIDERS[0]}", {})
    if found.get("whole", whole.get("curve")) == found["curve"]:
        return ""
    if "whole" not in found and (whole.get("machine") != found["machine"] or whole.get("torch") != found["torch"]):
        return OTHER_MACHINE
    return f"other losses than the clean run: {found['loss']!r} at the end, not {whole.get('loss')!r}"


def stale(record: Mapping[str, Any]) -> list[str]:
    """Say why the record does not fit the present cells; empty if it does."""
    reasons = [f"{name} was never run" for name in CELLS if name not in record]
    reasons += [f"{name} is no longer a cell" for name in record if name not in CELLS]
    old = [name for name, cell in CELLS.items() if name in record and record[name]["job"] != cells.job_digest(cell)]
    return reasons + ([f"the job of {len(old)} cells has changed since they ran, for example {old[0]}"] if old else [])


# ------------------------------------------------------------------------------------------------------------ the page


def page(record: Mapping[str, Any]) -> str:
    """Make docs/portability.md."""
    notes: list[str] = []
    ran = [cell for cell in CELLS.values() if cell.name in record]
    fine = sum(not wrong(record, cell) for cell in ran)
    parts = [_INTRO.format(passed=fine, run=len(ran)), _TRAININGS, "\n"]
    trainings = {f"{s} {w}": f"`{s}.py`, {w}: {why}" for s in TRAININGS for w, why in SCENARIOS.items()}
    parts += _table(record, trainings, notes)
    parts += [f"\nThe job of `{script}.py`:\n\n" + _job(script) for script in TRAININGS]
    parts += [_IMAGES, "\n", *_table(record, {f"image {tag}": f"`{tag}`: {is_}" for tag, is_ in IMAGES.items()}, notes)]
    parts += [_FIXTURES, "\n", *_table(record, {name: f"{name}: {what}" for name, what in FIXTURES.items()}, notes)]
    if notes:
        parts += ["\n## Notes\n\n", *(f"{number}. {note}\n" for number, note in enumerate(notes, 1))]
    return "".join([*parts, _END, "\n", *_ages(record)])


def _table(record: Mapping[str, Any], rows: Mapping[str, str], notes: list[str]) -> Iterator[str]:
    heads = [f"{name}, rehearsed" if name in CLOUDS else name for name in PROVIDERS]
    yield _line("", *heads)
    yield _line("---", *("---" for _ in heads))
    for row, means in rows.items():
        yield _line(means, *(_cell(record, f"{row}/{provider}", notes) for provider in PROVIDERS))


def _cell(record: Mapping[str, Any], name: str, notes: list[str]) -> str:
    if name in NOT:
        return f"– ({_note(NOT[name], notes)})"
    cell = CELLS[name]
    if what := wrong(record, cell):
        return f"not yet ({_note(what, notes)})" if name not in record else f"**fails** ({_note(what, notes)})"
    found = record[name]
    if cell.kind == "image":
        refused = cells.REFUSED.get(cell.row.partition(" ")[2])
        return f"refused ({_note(found['said'], notes)})" if refused else f"runs, {found['said']}"
    text = f"{found['loss']:.6f} **=**" + (f" ({_note(ELSEWHERE, notes)})" if "whole" in found else "")
    for attempt in found["attempts"][1:]:
        text += f"; {attempt['number']} resumed from {attempt['resumed_from']}"
    return text


def _note(text: str, notes: list[str]) -> int:
    text = " ".join(text.split())
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1


def _job(script: str) -> str:
    job = TRAININGS[script]
    shape = ", ".join(f"`{name}` {value}" for name, value in SHAPE.items())
    return f"- `{job['entry_point']} {' '.join(job['args'])}`, {shape}; each provider has its own image by `on`.\n"


def _line(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |\n"


def _ages(record: Mapping[str, Any]) -> Iterator[str]:
    """List when, at which commit and on which machine the cells ran, in groups."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, found in record.items():
        key = tuple(found[field] for field in ("commit", "machine", "python", "torch"))
        groups.setdefault(key, []).append(name)
    yield _line("cells", "when (UTC)", "commit", "machine", "Python and torch of `local`")
    yield _line(*("---",) * 5)
    for (made, where, python, torch), names in groups.items():
        times = [record[name]["began"] for name in names]
        rows = {row: [n.split("/")[1] for n in names if n.startswith(f"{row}/")] for row in _rows(names)}
        which = "; ".join(f"{row}: {', '.join(some)}" for row, some in rows.items())
        yield _line(which, f"{min(times)} to {max(times)}", f"`{made}`", where, f"{python}, {torch}")


def _rows(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.split("/")[0] for name in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
