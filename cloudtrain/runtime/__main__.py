"""``cloudtrain.pyz run --context PATH --attempt K [--path NAME=PATH]…``: the command that runs one node of a run.

``cloudtrain.pyz shell`` runs a command beside a node's ranks; see `shell`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CloudtrainError, SpecError, reason_of
from ..provider_api.node import PROTOCOL, NodeEnvironment
from ..provider_api.registry import find_provider
from .history import failed_for_good
from .mounts import in_thread
from .node import Node
from .record import write_cause

FAILURE_VARIABLE = "CLOUDTRAIN_FAILURE_FILE"
"""Variable with a file in which a provider leaves a cause, in case Python never runs. `main` removes the file."""


def main(argv: list[str]) -> int:
    """Run this node to its end. Return the exit code for the platform."""
    if argv[:1] == ["shell"]:
        from .shell import run_command

        return run_command(argv[1:])
    failure_file = os.environ.pop(FAILURE_VARIABLE, None)  # not for the script
    write_cause(failure_file, "")  # before anything can fail
    parser = argparse.ArgumentParser(prog="cloudtrain.pyz", allow_abbrev=False)
    parser.add_argument("verb", choices=["run"])
    parser.add_argument("--context", required=True, type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--path", action="append", default=[], metavar="NAME=PATH")
    options = parser.parse_args(argv[: [*argv, "--"].index("--")])  # behind it are words that a platform appends
    inbox: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()

    def hear(number: int, _: object) -> None:  # the grace counts from now, not from when the node reads the message
        inbox.put((-1, {"t": "signal", "number": number, "at": time.monotonic()}))

    signal.signal(signal.SIGTERM, hear)
    signal.signal(signal.SIGINT, hear)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the parent may have blocked it until here
    try:
        context = in_thread(lambda: _read(options.context), [options.context.parent])
        assert context is not None
        paths = dict(pair.split("=", 1) for pair in options.path)
        site = find_provider(context["provider"]).node_environment(os.environ, paths)
        failure_file = site.failure_file
        if site.restarts_in_place and (record := _failure_before(site, options.attempt)) is not None:
            return int(record["exit_code"])
        key = (options.context.parent / "key").read_bytes()
        return Node(context=context, site=site, attempt=options.attempt, key=key, inbox=inbox).run()
    except (CloudtrainError, OSError, ValueError, KeyError) as exc:
        why = f"this node cannot start: {reason_of(exc)}"
        sys.stderr.write(f"cloudtrain: {why}\n")
        write_cause(failure_file, why)
        return 1


def _failure_before(site: NodeEnvironment, attempt: int) -> dict[str, Any] | None:
    """Print and return the record of this attempt's failure if the container is started again after it.

    The platform's own message about the failure shows the last lines of a container, so these lines name the cause.
    """
    live = Path(site.paths["live"])
    record = in_thread(lambda: failed_for_good(live, attempt, site.exit_code["failed"]), [live])
    if record is not None:
        text = str((record.get("failure") or {}).get("traceback") or "").rstrip()
        text += f"\nattempt {record['attempt']} has failed: {record.get('reason') or 'no reason was recorded'}"
        text += "\nthis container was started again after that failure; the script does not run a second time"
        for line in text.lstrip("\n").splitlines():
            sys.stderr.write(f"cloudtrain: {line}\n")
    return record


def _read(path: Path) -> dict[str, Any]:
    context = json.loads(path.read_bytes())
    if not isinstance(context, dict):
        raise SpecError(f"{path} holds no table", field="context")
    if context.get("protocol") != PROTOCOL:
        raise SpecError(f"context of protocol {context.get('protocol')}, this is {PROTOCOL}", field="context")
    return context


def leave(argv: list[str]) -> NoReturn:
    """Call `main`, then end this process at once.

    Python would wait for the threads that copy. One that is stuck in a mount that hangs would keep the node for ever.
    """
    try:
        code = main(argv)
    except SystemExit as exc:  # argparse
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:  # noqa: BLE001  printed as Python would
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(sys.argv[1:])
