"""``cloudtrain.pyz run --context PATH --attempt K [--path NAME=PATH]…``: one node of a run."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
from pathlib import Path
from typing import Any

from ..errors import CloudtrainError, SpecError
from ..provider import PROTOCOL, find_provider
from .node import Node


def main(argv: list[str]) -> int:
    """Run this node to its end; the exit code is what the platform is to see."""
    parser = argparse.ArgumentParser(prog="cloudtrain.pyz", allow_abbrev=False)
    parser.add_argument("verb", choices=["run"])
    parser.add_argument("--context", required=True, type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--path", action="append", default=[], metavar="NAME=PATH")
    options = parser.parse_args(argv)
    inbox: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: inbox.put((-1, {"t": "signal", "number": number})))
    try:
        context = json.loads(options.context.read_bytes())
        if context["protocol"] != PROTOCOL:
            raise SpecError(f"context of protocol {context['protocol']}, this is {PROTOCOL}", field="context")
        paths = dict(pair.split("=", 1) for pair in options.path)
        site = find_provider(context["provider"]).site(os.environ, paths)
        key = (options.context.parent / "key").read_bytes()
        return Node(context=context, site=site, attempt=options.attempt, key=key, inbox=inbox).run()
    except (CloudtrainError, OSError, ValueError, KeyError) as exc:
        sys.stderr.write(f"cloudtrain: this node cannot start: {exc}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
