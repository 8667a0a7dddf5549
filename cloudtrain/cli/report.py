"""The verbs that show a run to a person: report and watch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import SpecError
from ..provider_api.protocol import FINAL
from ..report.live_data import printable as tame
from . import format
from .common_flags import HERE, At, stoppable
from .output import Screen
from .runs import EXIT_DETACHED, Json, More, Ours, Ref, _called, _open_any, each_run

Out = Annotated[
    str | None,
    Parameter(name=("--out", "-o"), metavar="PATH", help="file or folder to write; default: ./<run id>.html"),
]


def report(run: Ref, /, *more: More, out: Out = None, at: At = HERE, json: Json = False, screen: Ours[Screen]) -> int:
    """Write one HTML page about each run, and one that compares several runs. They open without a network."""
    from ..report.report import write
    from ..runs.run import Run

    runs = [run, *more]
    if more and out is not None and not Path(out).is_dir():
        raise SpecError(
            f"{out!r} is not a folder, and {len(runs)} runs are {len(runs)} files",
            field="out",
            hint=f"to make it: mkdir {out}",
        )

    def one(word: str) -> dict[str, Any]:
        handle = _open_any(word, at, screen)
        if isinstance(handle, Run):
            path, result = write(handle, Path(out or "."))
            states.append(result["state"])
            found.append((handle, result))
        else:
            path = handle.report(out or ".")
            states.append("succeeded")
        screen.value(str(path), f"wrote {path}")
        return {**screen.about, "report": str(path), "exit_code": 0}

    def then(run: str, _: dict[str, Any]) -> list[list[str]]:
        if not found:  # a sweep has no log of its own
            return [["list", run], ["status", run]]
        return [["pull" if states[0] in FINAL else "watch", run], ["logs", run]]

    def compare() -> dict[str, Any]:
        from ..report.comparison import write_comparison

        if len(found) < 2:
            return {"comparison": None}
        path = write_comparison(found, Path(out or "."))
        screen.value(str(path), f"wrote {path}")
        return {"comparison": str(path)}

    states: list[str] = []
    found: list[tuple[Run, dict[str, Any]]] = []
    return each_run(runs, one, then, at, screen, also=compare)


def watch(run: Ref, /, *, at: At = HERE, json: Json = False, screen: Ours[Screen]) -> int:
    """Show a live view of the run until it ends. Without a terminal, or for JSON, print a line for each change."""
    from ..runs.run import Run
    from .watch import Watch, follow, on_terminal

    with stoppable():
        handle = _open_any(run, at, screen)
        if not isinstance(handle, Run):
            from .sweep import watch_sweep

            return watch_sweep(handle, at, screen)
        run = _called(run, screen.about)
        try:
            if screen.draws:
                from rich.console import Console

                last = on_terminal(Watch(handle), Console(file=screen.out))
            else:
                last = follow(lambda draw: Watch(handle, on_picture=draw), screen.talk if screen.json else screen.data)
        except KeyboardInterrupt:
            screen.talk("\nno longer watching; the run continues")
            screen.next(["watch", run], ["wait", run], ["cancel", run], where=at.flags)
            screen.answer({**screen.about, "error": "interrupted; the run continues", "exit_code": EXIT_DETACHED})
            return EXIT_DETACHED
    if last.result and last.result["state"] != "succeeded":
        screen.talk("\n".join(tame(line) for line in format.outcome(last.result).split("\n")))
    if last.result:
        screen.answer(last.result)
    screen.next(["report", run], ["pull", run], ["logs", run], where=at.flags)
    return 0
