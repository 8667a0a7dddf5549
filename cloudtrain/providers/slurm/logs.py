"""Read a job's lines from its files: one of the batch script and of Slurm's own words, and one of each node."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...errors import PlatformError
from ...provider_api.protocol import LogLine, LogPage
from .api import job_of

if TYPE_CHECKING:
    from .api import Account

PAGE_BYTES = 1 << 20
"""Most bytes of one file in a page."""
_READ = r"""
cd "$base" 2>/dev/null || exit 66
for file in node-*.log batch.log; do
    [ -f "$file" ] || continue
    at="$file=0 $cursor"; at=${at##*"$file="}; at=${at%% *}
    length=$(($(stat -c %s "$file") - at)); [ "$length" -lt "$most" ] || length=$most
    [ "$length" -gt 0 ] || continue
    echo "file $file $length"
    tail -c "+$((at + 1))" "$file" | head -c "$length"
    echo
done
"""


def page(account: Account, native_id: str, cursor: Any) -> LogPage:
    """Return whole lines from ``cursor``, the offset in each file by its name."""
    offsets: dict[str, int] = dict(cursor or {})
    known = " ".join(f"{name}={at}" for name, at in offsets.items())
    given = {"base": job_of(native_id)[1], "cursor": known, "most": str(PAGE_BYTES)}
    data = account.cluster.run(_READ, what="read the log", **given)
    lines, more = list[LogLine](), False
    while data:
        head, _, data = data.partition(b"\n")
        match = re.fullmatch(rb"file ((?:node-(\d+)|batch)\.log) (\d+)", head)
        if match is None:
            raise PlatformError("read the log: an answer without its documented form")
        name, node, length = match[1].decode(), (match[2] or b"").decode(), int(match[3])
        text, data = data[:length], data[length + 1 :]
        more |= length == PAGE_BYTES
        long = text if length == PAGE_BYTES else b""  # a line longer than a page comes in parts
        offsets.setdefault(name, 0)
        for line in (text[: text.rfind(b"\n") + 1] or long).splitlines(keepends=True):
            shown = line.decode("utf-8", "replace").rstrip("\r\n")
            lines.append(LogLine(node=node, text=shown, id=f"{name}:{offsets[name]}"))
            offsets[name] += len(line)
    return LogPage(lines=tuple(lines), cursor=offsets, more=more)
