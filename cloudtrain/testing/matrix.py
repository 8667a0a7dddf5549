"""Print ``python -m cloudtrain.testing.matrix > docs/providers.md``: each provider's use of every field of a Job.

The rows are those of the contract suite, planned here and now with each provider of the package. Nothing is written by
hand, so the page cannot differ from the code.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import EXIT_CODES
from ..job.job import Input, Job, Resources, Source
from ..provider_api.protocol import Provider
from ..provider_api.registry import find_provider, provider_names
from .tables import CASES, ELSEWHERE, PLATFORM, SCRIPT, SECRETS, Place, Row, Sample, by_client, platform_rows, verdict

__all__ = ["main", "page"]

_INTRO = """# Providers

<!-- Generated: python -m cloudtrain.testing.matrix > docs/providers.md -->

What each provider does with each field of a Job. **request**: a change of the field changes the native request;
**script**: it changes context.json, from which the node starts the script, and the contract suite has seen the script
see it; **refused**: `plan` ends with exit code 2 and one line that names the field and says why. There is no fourth
way: a test fails for a field that is silently ignored, and for one that has no row here.
"""
_ENDS = """
## How a run can end

Each row is a job that the contract suite submits to every provider's fake platform, and what it must then find.

| what happens | state | category | attempts |
| --- | --- | --- | --- |
"""
_CATEGORIES = """
## Categories

The exit code is that of `submit` and `wait`. A category that only the platform can cause is a fault of a fake platform;
where a platform has no such thing, its fake says why.

| category | exit code | brought about by |
| --- | --- | --- |
"""


def page(names: Sequence[str]) -> str:
    """Return the whole page, for the providers called ``names``."""
    providers = [find_provider(name) for name in names]
    notes: list[str] = []
    parts = [_INTRO, "\n## What they are\n\n", *_borders(providers), "\n## Fields\n\n"]
    with tempfile.TemporaryDirectory() as folder:
        parts += _fields(providers, Path(folder), notes)
    parts.append("\n" + "".join(f"{number}. {note}\n" for number, note in enumerate(notes, 1)))
    parts += [f"\n`{name}` {why}.\n" for name, why in ELSEWHERE.items()]
    return "".join([*parts, _ENDS, *_cases(), _CATEGORIES, *_categories()])


def _borders(providers: Sequence[type[Provider]]) -> Iterator[str]:
    yield _line("", *(f"`{p.name}`" for p in providers))
    yield _line("---", *("---" for _ in providers))
    yield _line("settings", *(", ".join(f"`{f.name}`" for f in dataclasses.fields(p.Settings)) for p in providers))
    yield _line("inputs its nodes read", *(", ".join(f"`{s}:`" for s in sorted(p.schemes)) for p in providers))
    yield _line("who starts further attempts", *(p.retried_by for p in providers))


def _fields(providers: Sequence[type[Provider]], folder: Path, notes: list[str]) -> Iterator[str]:
    columns = [_column(provider, folder / provider.name, notes) for provider in providers]
    yield _line("field", "is", *(f"`{p.name}`" for p in providers))
    yield _line("---", "---", *("---" for _ in providers))
    for name in columns[0]:
        means = f"a reference of the form `{SECRETS[name[9:-1]]}`" if name.startswith("secrets (") else _help(name)
        yield _line(f"`{name}`", means, *(column[name] for column in columns))


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _column(provider: type[Provider], folder: Path, notes: list[str]) -> dict[str, str]:
    """Return the cells of one provider, by field. New reasons are appended to ``notes``."""
    sample = Sample.of(provider)
    store = sample.store or (folder / "store").as_uri()
    place = Place.make(folder, store=store, provider=provider.name, secret=sample.secret)
    platform, made = platform_rows(provider), provider(**sample.settings)
    cells = {}
    for name in dict.fromkeys([*PLATFORM, *SCRIPT]):
        if name != "secrets":
            rows = [row for table in (platform, SCRIPT) if (row := table.get(name))]
            cells[name] = _cell(made, name, place, rows, sample, notes)
    for kind, reference in SECRETS.items():
        cells[f"secrets ({kind})"] = _cell(made, "secrets", place, [_secret(reference)], sample, notes)
    return cells


def _secret(reference: str) -> Row:
    return Row(change=lambda place: {"secrets": {"TOKEN": reference}})


def _cell(provider: Provider, name: str, place: Place, rows: Sequence[Row], sample: Sample, notes: list[str]) -> str:
    reached: set[str] = set()
    for row in rows:
        parts, refused = verdict(provider, place, row, sample.job)
        if refused is not None:
            if refused.why not in notes:
                notes.append(refused.why)
            return f"refused ({notes.index(refused.why) + 1})"
        reached |= parts
    if not reached:
        return "the waiting client" if by_client(provider, name) else "ignored"
    return " and ".join(word for part, word in (("body", "request"), ("context", "script")) if part in reached)


def _help(name: str) -> str:
    """Return the field's own help text."""
    owner, _, field = name.rpartition(".")
    kinds: dict[str, type[Any]] = {"": Job, "source": Source, "resources": Resources, "inputs": Input}
    found = next(f for f in dataclasses.fields(kinds[owner]) if f.name == field)
    return str(found.metadata.get("help", "")).replace("|", "\\|")


def _cases() -> Iterator[str]:
    for case in CASES.values():
        yield _line(case.means, case.state, case.category or "", ", ".join(case.attempts))
    yield _line("no line, metric or checkpoint for `stall_timeout`", "failed", "stalled", "0.0")


def _categories() -> Iterator[str]:
    ends = {case.category for case in CASES.values()} | {"stalled"}
    for name, code in EXIT_CODES.items():
        yield _line(f"`{name}`", str(code), "a job of the suite" if name in ends else "the platform")


def main() -> None:
    """Print the page of the package's own providers."""
    own = [name for name in provider_names() if find_provider(name).__module__.startswith("cloudtrain.")]
    sys.stdout.write(page(own))


if __name__ == "__main__":
    main()
