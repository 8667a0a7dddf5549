"""``docs/reference.md``, every flag and every setting: ``python tools/reference_page.py > docs/reference.md``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cloudtrain import cli
from cloudtrain.cli.flags import NOT_FLAGS
from cloudtrain.job.job import FLAT_FIELDS
from cloudtrain.provider_api.registry import find_provider, provider_names
from cloudtrain.settings.settings import Settings

HEAD = """# Flags and settings

<!-- Generated: python tools/reference_page.py > docs/reference.md -->

Look up a flag or a setting on this page. To see the flags of one verb, run `cloudtrain help VERB`. To see the value and
the meaning of one setting, run `cloudtrain config KEY`. See [cli.md](cli.md) for the use of flags and settings.

## Flags of a job

These flags describe your job. `submit`, `plan`, `rehearse` and `doctor` take all of them. See
[cli.md](cli.md#flags-of-a-job) for tables, lists and durations in a flag.
"""
GENERAL = """
## Settings

Put these settings at the top level of `cloudtrain.toml`, or [elsewhere](cli.md#settings).
"""
OF_PROVIDERS = """
## Settings of a provider

Put these settings into the table `[PROVIDER]` of the file. See [cli.md](cli.md#settings-of-a-provider) for tables and
regions, and [cost.md](cost.md) for `prices`.
"""


def main() -> None:
    sys.stdout.write(page())


def page() -> str:
    """Return the page, with the providers of the package."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for verb in cli.VERBS:
        for cell, text, of_job in _flags(verb):
            verbs.setdefault((cell, text), []).append("" if of_job else verb)
    job = [(cell, text) for (cell, text), of in verbs.items() if "" in of]
    others = [(cell, _verbs(of), text) for (cell, text), of in verbs.items() if "" not in of]
    parts = [HEAD, _table(("flag", "meaning"), job)]
    parts += ["\n## Other flags\n", _table(("flag", "of", "meaning"), others)]
    parts += [GENERAL, _settings(Settings), OF_PROVIDERS]
    for name in provider_names():
        if (kind := find_provider(name)).__module__.startswith("cloudtrain."):
            parts += [f"\n### {name}\n", _settings(kind.Settings)]
    return "".join(parts)


def _flags(verb: str) -> Iterator[tuple[str, str, bool]]:
    """Yield a verb's flags with their meanings, in the order of its help; and whether they are fields of a Job."""
    job = set(FLAT_FIELDS) - set(NOT_FLAGS)
    for item in cli.make_app()[verb].assemble_argument_collection():
        names = ", ".join(f"`{name}`" for name in item.names if name.startswith("-"))
        if item.parse and item.parameter.help and names:
            form = f" `{item.parameter.metavar}`" if item.parameter.metavar else ""
            yield names + form, str(item.parameter.help), bool(item.keys) and item.keys[-1] in job


def _verbs(of: Sequence[str]) -> str:
    """Return the names of these verbs; if most verbs are in the list, name the others."""
    others = [verb for verb in cli.VERBS if verb not in of]
    if len(others) < len(of) // 2:
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(of)


def _settings(kind: type[Any]) -> str:
    rows = []
    for spec in dataclasses.fields(kind):
        if text := spec.metadata.get("help"):
            shown = spec.default not in ("", (), 0, dataclasses.MISSING)
            rows.append((f"`{spec.name}`", f"`{spec.default}`" if shown else "", text))
    return _table(("key", "default", "meaning"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return "".join(["\n", *(f"| {' | '.join(line)} |\n" for line in lines)])


if __name__ == "__main__":
    main()
