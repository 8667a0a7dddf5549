"""Print ``python tools/providers_page.py > docs/providers.md``: each provider's use of every field of a Job.

The rows are those of the contract suite, planned with each provider of the package. No cell is written by hand, so the
page cannot differ from the code.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cloudtrain.errors import EXIT_CODES
from cloudtrain.provider_api.protocol import Provider, extras_of_type
from cloudtrain.provider_api.registry import find_provider, provider_names
from cloudtrain.testing.tables import (
    CASES,
    ELSEWHERE,
    PLATFORM,
    SCRIPT,
    SECRETS,
    Place,
    Row,
    Sample,
    by_client,
    field_helps,
    needs_nothing,
    platform_rows,
    secret_row,
    verdict,
)

_INTRO = """# Providers

<!-- Generated: python tools/providers_page.py > docs/providers.md -->

What each provider does with each field of a Job. **request**: a change of the field changes the native request;
**script**: it changes context.json, from which the node starts the script, and the contract suite has seen the script
see it; **refused**: `plan` ends with exit code 2 and one line that names the field and says why; **always so**: the
platform does so for every job, and `plan` says so in a note; **with** a setting: refused without it. There is no other
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
    with tempfile.TemporaryDirectory() as folder:
        columns = [_column(provider, Path(folder, provider.name), notes) for provider in providers]
    parts = [_INTRO, "\n## What they are\n\n", *_borders(providers), "\n## Fields\n\n", *_fields(names, columns), "\n"]
    parts += [f"{number}. {note}\n" for number, note in enumerate(notes, 1)]
    parts += [f"\n`{name}` {why}.\n" for name, why in ELSEWHERE.items()]
    return "".join([*parts, _ENDS, *_cases(), _CATEGORIES, *_categories()])


def _borders(providers: Sequence[type[Provider]]) -> Iterator[str]:
    yield _line("", *(f"`{p.name}`" for p in providers))
    yield _line("---", *("---" for _ in providers))
    yield _line("settings", *(f"[{p.name}](reference.md#{p.name})" for p in providers))
    yield _line("inputs its nodes read", *(", ".join(f"`{s}:`" for s in sorted(p.schemes)) for p in providers))
    yield _line("who starts further attempts", *(p.retried_by for p in providers))


def _fields(names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> Iterator[str]:
    yield _line("field", "is", *(f"`{name}`" for name in names))
    yield _line("---", "---", *("---" for _ in names))
    helps = field_helps() | {
        f"secrets ({kind})": f"a reference of the form `{reference}`" for kind, reference in SECRETS.items()
    }
    for field in columns[0]:
        yield _line(f"`{field}`", helps[field].replace("|", "\\|"), *(column[field] for column in columns))


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _column(provider: type[Provider], folder: Path, notes: list[str]) -> dict[str, str]:
    """Return the cells of one provider, by field. New reasons are appended to ``notes``."""
    sample = Sample.of(provider)
    store = sample.store or (folder / "store").as_uri()
    place = Place(folder, store=store, provider=provider.name, secret=sample.secret)
    platform, made, extras = platform_rows(provider), provider(**sample.settings), extras_of_type(provider)
    warm = provider(**{**sample.settings, extras.warm_setting: "warm"}) if extras.warm_setting else None

    def cell(name: str, rows: Sequence[Row]) -> str:
        reached: set[str] = set()
        for row in rows:
            parts, refused = verdict(made, place, row, sample.job)
            if refused is not None:
                if name == "keep_warm" and warm and verdict(warm, place, row, sample.job)[1] is None:
                    return f"with `{extras.warm_setting}`"
                if refused.why not in notes:
                    notes.append(refused.why)
                return f"refused ({notes.index(refused.why) + 1})"
            reached |= parts
        if not reached:
            if needs_nothing(made, name):
                return "always so"
            return "the waiting client" if by_client(made, name) else "ignored"
        return " and ".join(word for part, word in (("body", "request"), ("context", "script")) if part in reached)

    names = [name for name in dict.fromkeys([*PLATFORM, *SCRIPT]) if name != "secrets"]
    cells = {name: cell(name, [table[name] for table in (platform, SCRIPT) if name in table]) for name in names}
    return cells | {f"secrets ({kind})": cell("secrets", [secret_row(kind)]) for kind in SECRETS}


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
