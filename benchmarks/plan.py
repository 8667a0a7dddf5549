"""``cloudtrain plan`` of 2,000 files / 50 MB compared with ``git ls-files | tar | sha256sum`` of the same tree.

Both read every byte once and hash it. plan also asks git for ignored files and the rules, checks for secrets and for
links out of the tree, and makes the request. Each side is a whole command, with the start of its interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from common import (
    CLOUDTRAIN,
    Figure,
    cost_of,
    environ,
    median_ratio,
    options,
    pairs,
    parser,
    report,
    scratch,
    sides,
    tree,
)

FILES = 2_000
BYTES = 50_000_000
TARGET = 2.0
PEER = "git ls-files -z | tar --null -T - -cf - | sha256sum"


def main() -> int:
    chosen = options(parser(__doc__, count=15, quick=9))
    with scratch() as folder:
        code = tree(folder / "code", files=FILES, size=BYTES, script="print('hello')\n")
        words = [CLOUDTRAIN, "plan", "train.py", "--json"]
        text = subprocess.run(words, cwd=code, env=environ(), check=True, capture_output=True, text=True).stdout
        check(text)
        found = pairs(
            partial(cost_of, words, cwd=code),
            partial(cost_of, ["bash", "-o", "pipefail", "-c", PEER], cwd=code),
            count=chosen.pairs,
        )
    wall, cpu = (
        Figure(
            name=f"{what} of cloudtrain plan / git | tar | sha256sum, {FILES:,} files",
            value=median_ratio(found, what),
            target=TARGET if what == "wall" else None,
            note=sides(found, what),
            pairs=found if what == "wall" else (),
        )
        for what in ("wall", "cpu")
    )
    return report([wall, cpu], as_json=chosen.json)


def check(text: str) -> None:
    """Check that the plan ships the whole tree: a smaller one would be cheaper."""
    import json

    code = json.loads(text)["code"]
    if (len(code["files"]), code["bytes"]) != (FILES, BYTES):
        raise SystemExit(f"plan ships {len(code['files'])} files, {code['bytes']} bytes; not {FILES} and {BYTES}")


if __name__ == "__main__":
    sys.exit(main())
