"""``docs/python.md``, made of the docstrings: ``python tools/python_page.py > docs/python.md``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from cloudtrain import errors
from cloudtrain.estimator import Estimator, RunFailedError, attach, plan, submit
from cloudtrain.job.job import FLAT_FIELDS, Input, Job, Resources, Source
from cloudtrain.provider_api.protocol import Status
from cloudtrain.runs.log_order import Line
from cloudtrain.runs.pull import PullReport
from cloudtrain.runs.run import INTERNAL, Run
from cloudtrain.runs.submit import Plan
from cloudtrain.runs.sweeps.sweep import Sweep

HEAD = """# Python API

Describe a job with `Job.make`, look at its plan, and send it. `submit` returns a `Run`. For a run that exists, call
`attach`.

```python file=train.py
print("trained")
```

```python run
import cloudtrain
from cloudtrain import Job

job = Job.make(entry_point="train.py", max_runtime="5m")
print(cloudtrain.plan(job))  # exactly what submit would send
run = cloudtrain.submit(job, run_id="api-1")
print(run)  # the state, and the next call

result = run.wait(on_line=lambda line: print(line.text))
assert result["state"] == "succeeded"
run.pull("results")

again = cloudtrain.attach("api-1")  # or run.url, from any machine
assert [line.text for line in again.logs(rank=0, n=1)] == ["trained"]
again.report("api-1.html")
```

These verbs of the [command line](cli.md) have a call:

| command | in Python |
| --- | --- |
| `cloudtrain plan` | `cloudtrain.plan(job)` |
| `cloudtrain submit` | `cloudtrain.submit(job).wait(on_line=…)` or `Estimator(…).fit()` |
| `cloudtrain submit --detach` | `cloudtrain.submit(job)` |
| `cloudtrain rehearse` | `Estimator(…).rehearse()` |
| `cloudtrain status` | `cloudtrain.attach(run).result()` |
| `cloudtrain logs -f -n 20 --since 10m` | `run.logs(follow=True, n=20, since="10m")` |
| `cloudtrain wait` | `run.wait()` |
| `cloudtrain pull` | `run.pull(folder)` |
| `cloudtrain report` | `run.report(path)` |
| `cloudtrain cancel` | `run.cancel()` |
| `cloudtrain reconcile` | `Estimator.reconcile(run_or_store)` |
| `cloudtrain sweep` | `cloudtrain.Sweep(job, space=…, metric=…).run()` |

For the other verbs, use the command line.

Call `print(plan)` or `print(run)` to see a summary with the next call. A notebook shows it as a table.

A traceback of an error of cloudtrain shows your own lines, the message and a hint. If these name a flag of the command
line, a line `in Python:` has its keyword. Set `CLOUDTRAIN_DEBUG=1` to see the
lines of cloudtrain too.

`tools/python_page.py` makes this page from the docstrings.
"""
OWN = {
    "provider": "name of the platform; default: the setting, else `local`",
    "store": "URL or folder below which code, data and runs are kept",
    "profile": "profile of the settings file",
    "fallback": "profiles to try next, in order, if there are no machines",
    "settings": 'settings of cloudtrain or of the provider: `{"region": "…"}`',
    "write": "called with the text of each log line; default: stdout",
}
"""The Estimator's keywords that are not fields of a Job."""


def main() -> int:
    sys.stdout.write(page())
    return 0


def page() -> str:
    """Return the whole page."""
    plan_text = "`str(plan)` is the summary that `cloudtrain plan` prints."
    job = "A [job file](cli.md#job-files) has the same fields."
    sections = [
        HEAD,
        *(text for function in (plan, submit, attach) for text in _function(function)),
        *_object("Job", Job, job, []),
        *_object("Run", Run, "", _properties(Run)),
        *_object("Plan", Plan, plan_text, [], only=("document",)),
        *_object("Sweep", Sweep, "", _properties(Sweep)),
        *_object("Estimator", Estimator, "The keywords:", _keywords()),
    ]
    for kind in (Source, Resources, Input, Line, Status, PullReport):
        sections += _object(kind.__name__, kind, "", _fields(kind), only=())
    sections += _errors()
    return "\n\n".join(text.strip("\n") for text in sections if text) + "\n"


def _function(function: Any) -> Iterator[str]:
    """Yield the section of a function of the package: how it is called, and its docstring."""
    yield f"## {function.__name__}"
    yield f"```text\n{_signature('cloudtrain', function.__name__, function)}\n```"
    yield _markdown(inspect.getdoc(function) or "")


def _object(
    title: str, kind: type, more: str, table: list[str], *, only: tuple[str, ...] | None = None
) -> Iterator[str]:
    """Yield the section of a class: its docstring, a table, its public methods."""
    yield f"## {title}"
    text = _markdown(inspect.getdoc(kind) or "")
    yield text.split("\n\n")[0] if kind is Plan else text  # the rest describes how it is sent
    yield more
    yield "\n".join(table)
    for name, member in _methods(kind):
        if only is None or name in only:
            yield f"### {title}.{name}"
            yield f"```text\n{_signature(title, name, member)}\n```"
            yield _markdown(inspect.getdoc(member) or "")


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        found = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if not name.startswith("_") and name not in INTERNAL and inspect.isfunction(found):
            yield name, getattr(kind, name) if isinstance(member, (staticmethod, classmethod)) else found


def _signature(title: str, name: str, function: Any) -> str:
    """Return how a method is called, without types; one argument a line where they do not fit."""
    words: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        shown = "…" if inspect.isfunction(parameter.default) else repr(parameter.default)
        default = "" if parameter.default is parameter.empty else f"={shown}"
        marks = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}
        words.append(f"{marks.get(parameter.kind, '')}{parameter.name}{default}")
    one = f"{title}.{name}({', '.join(words)})"
    return one if len(one) <= 100 else f"{title}.{name}(\n    " + ",\n    ".join(words) + ",\n)"


def _keywords() -> list[str]:
    owners = {"": Job, "source": Source, "resources": Resources}
    rows = ["| keyword | meaning |", "| --- | --- |"]
    for flat in inspect.signature(Estimator).parameters:
        if flat in FLAT_FIELDS:
            owner, name = FLAT_FIELDS[flat]
            text = next(f.metadata.get("help", "") for f in dataclasses.fields(owners[owner]) if f.name == name)
        else:
            text = OWN[flat]
        rows.append(f"| `{flat}` | {text.replace('|', chr(92) + '|')} |")
    return rows


def _fields(kind: type) -> list[str]:
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        shown = "" if default is dataclasses.MISSING else f"`{default!r}`"
        rows.append(f"| `{field.name}` | {shown} | {field.metadata.get('help', '').replace('|', chr(92) + '|')} |")
    if all(row.endswith("|  |") for row in rows[2:]):  # the docstring has all of them
        rows = ["Fields: " + ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind)) + "."]
    return rows


def _properties(kind: type) -> list[str]:
    rows = ["| property | meaning |", "| --- | --- |"]
    for name in sorted(dir(kind)):
        member = inspect.getattr_static(kind, name)
        if not name.startswith("_") and name not in INTERNAL and isinstance(member, property):
            text = " ".join(_markdown(inspect.getdoc(member) or "").split("\n\n")[0].split())
            rows.append(f"| `{name}` | {text} |")
    return rows


def _errors() -> Iterator[str]:
    yield "## Errors"
    yield (
        "Every error that cloudtrain raises on purpose is a `CloudtrainError`. Its text says what is wrong, and its"
        " `hint` says how to fix it. `exit_code` is the exit code of the command line. Import `RunFailedError` from"
        " `cloudtrain.estimator`, and all others from `cloudtrain.errors`."
    )
    rows = ["| class | is a | exit code | meaning |", "| --- | --- | --- | --- |"]
    kinds = [getattr(errors, name) for name in errors.__all__]
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, errors.CloudtrainError)]
    for kind in sorted([*found, RunFailedError], key=lambda kind: (len(kind.__mro__), kind.__name__)):
        text = " ".join(_markdown(inspect.getdoc(kind) or "").split("\n\n")[0].split())
        code = "its category's" if kind is RunFailedError else str(kind.exit_code)
        rows.append(f"| `{kind.__name__}` | `{kind.__mro__[1].__name__}` | {code} | {text} |")
    yield "\n".join(rows)


def _markdown(text: str) -> str:
    """Return a docstring as Markdown: its literals, its block of code, its list of parameters."""
    out: list[str] = []
    lines = text.replace("``", "`").split("\n")
    i = 0
    while i < len(lines):
        line = lines[i]
        inside = i + 1 < len(lines) and lines[i + 1].startswith("    ")
        if line.strip() == "::":
            block = []
            while i + 1 < len(lines) and (not lines[i + 1] or lines[i + 1].startswith("    ")):
                i += 1
                block.append(lines[i][4:])
            out += ["```python", *"\n".join(block).strip("\n").split("\n"), "```", ""]
        elif re.fullmatch(r"`\w+`(, `\w+`)*", line) and inside:
            words = []
            while i + 1 < len(lines) and lines[i + 1].startswith("    "):
                i += 1
                words.append(lines[i].strip())
            out += [] if out and out[-1].startswith("- ") else [""]
            out.append(f"- {line}: {' '.join(words)}")
        else:
            out.append(line)
        i += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip("\n")


if __name__ == "__main__":
    sys.exit(main())
