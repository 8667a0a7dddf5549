"""``python -m cloudtrain.testing.matrix > docs/providers.md``: what every provider does with every field of a Job.

The rows are those of the contract suite, planned here and now with each provider of the package; nothing is written by
hand, so the page cannot say what the code does not do.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import EXIT_CODES
from ..job import FLAT_FIELDS, Input, Job, Resources, Source
from ..provider import Provider, find_provider, provider_names
from .tables import CASES, ELSEWHERE, PLATFORM, SCRIPT, Place, Row, Sample, platform_rows, verdict

__all__ = ["main", "page"]

_INTRO = """# Providers

<!-- Generated: python -m cloudtrain.testing.matrix > docs/providers.md -->

What each provider does with each field of a Job. **request**: a change of the field changes the native request;
**script**: it changes context.json, from which the node starts the script, and the contract suite has seen the script
see it; **refused**: `plan` ends with exit code 2 and one line that names the field and says why. There is no fourth way:
a test fails for a field that is silently ignored, and for one that has no row here.
"""
_ENDS = """
## How a run can end

Each row is a job that the contract suite submits to every provider's World, and what it must then find.

| what happens | state | category | exit code of `submit` and `wait` | attempts |
| --- | --- | --- | --- | --- |
"""
_CATEGORIES = """
Categories that the platform alone brings about: {others}. A World that can raises them, and the suite checks the exit
code. All categories and their exit codes: {codes}.
"""


def page(names: Sequence[str]) -> str:
    """The whole page, for the providers called ``names``."""
    providers = [find_provider(name) for name in names]
    notes: list[str] = []
    parts = [_INTRO, "\n## What they are\n\n", *_borders(providers), "\n## Fields\n\n"]
    with tempfile.TemporaryDirectory() as folder:
        parts += _fields(providers, Path(folder), notes)
    parts.append("\n" + "".join(f"{number}. {note}\n" for number, note in enumerate(notes, 1)))
    parts += [f"\n`{name}` {why}.\n" for name, why in ELSEWHERE.items()]
    parts += [_ENDS, *_cases()]
    reached = {case.category for case in CASES.values()} | set(CASES) | {"stalled"}
    others = ", ".join(f"`{name}`" for name in EXIT_CODES if name not in reached)
    codes = ", ".join(f"`{name}` {code}" for name, code in EXIT_CODES.items())
    parts.append(_CATEGORIES.format(others=others, codes=codes))
    return "".join(parts)


def _borders(providers: Sequence[type[Provider]]) -> Iterator[str]:
    yield "| | " + " | ".join(f"`{p.name}`" for p in providers) + " |\n"
    yield "| --- |" + " --- |" * len(providers) + "\n"
    schemes = [", ".join(f"`{scheme}:`" for scheme in sorted(p.schemes)) for p in providers]
    settings = [", ".join(f"`{f.name}`" for f in dataclasses.fields(p.Settings)) for p in providers]
    yield "| settings | " + " | ".join(settings) + " |\n"
    yield "| inputs its nodes read | " + " | ".join(schemes) + " |\n"
    yield "| who starts further attempts | " + " | ".join(p.retried_by for p in providers) + " |\n"


def _fields(providers: Sequence[type[Provider]], folder: Path, notes: list[str]) -> Iterator[str]:
    columns = [_column(provider, folder / provider.name, notes) for provider in providers]
    yield "| field | is | " + " | ".join(f"`{p.name}`" for p in providers) + " |\n"
    yield "| --- | --- |" + " --- |" * len(providers) + "\n"
    for name in dict.fromkeys([*PLATFORM, *SCRIPT]):
        yield f"| `{name}` | {_help(name)} | " + " | ".join(column[name] for column in columns) + " |\n"


def _column(provider: type[Provider], folder: Path, notes: list[str]) -> dict[str, str]:
    sample = Sample.of(provider)
    made = provider(**sample.settings)
    place = Place.make(folder, store=sample.store or (folder / "store").as_uri(), provider=provider.name)
    cells = {}
    for name in dict.fromkeys([*PLATFORM, *SCRIPT]):
        rows = [row for table in (platform_rows(provider), SCRIPT) if (row := table.get(name))]
        cells[name] = _cell(made, place, rows, sample, notes)
    return cells


def _cell(provider: Provider, place: Place, rows: Sequence[Row], sample: Sample, notes: list[str]) -> str:
    reached: set[str] = set()
    for row in rows:
        parts, refused = verdict(provider, place, row, sample.job)
        if refused is not None:
            if refused.why not in notes:
                notes.append(refused.why)
            return f"refused ({notes.index(refused.why) + 1})"
        reached |= parts
    if not reached:
        return "the waiting client" if provider.retried_by == "client" else "ignored"
    return " and ".join(word for part, word in (("body", "request"), ("context", "script")) if part in reached)


def _help(name: str) -> str:
    """The field's own help text."""
    owner, _, field = name.rpartition(".")
    kinds: dict[str, type] = {"": Job, "source": Source, "resources": Resources, "inputs": Input}
    assert owner == "inputs" or name.rpartition(".")[2] in {*FLAT_FIELDS, "path"}
    found = next(f for f in dataclasses.fields(kinds[owner]) if f.name == field)
    return str(found.metadata.get("help", "")).replace("|", "\\|")


def _cases() -> Iterator[str]:
    for case in CASES.values():
        attempts = ", ".join(case.attempts)
        yield f"| {case.means} | {case.state} | {case.category or ''} | {case.exit_code} | {attempts} |\n"


def main() -> None:
    own = [name for name in provider_names() if find_provider(name).__module__.startswith("cloudtrain.")]
    sys.stdout.write(page(own))


if __name__ == "__main__":
    main()
