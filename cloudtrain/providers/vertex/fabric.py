"""Set up GPUDirect on nodes of provider ``vertex``: NCCL's variables, from the machine's own script.

Machines with H200, B200 and GB200 have GPUDirect-RDMA, machines with H100-mega have GPUDirect-TCPXO. For RDMA Google
asks the user to source a script before the command: Vertex AI's page on compute resources. That page names no step for
TCPXO. Its script comes from Google Kubernetes Engine's page on GPUDirect; it is unverified in a job of Vertex AI.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

RDMA, TCPXO = "GPUDirect-RDMA", "GPUDirect-TCPXO"
TRANSPORTS: Mapping[str, str] = {
    **dict.fromkeys(("NVIDIA_H200_141GB", "NVIDIA_B200", "NVIDIA_GB200"), RDMA),
    "NVIDIA_H100_MEGA_80GB": TCPXO,
}
"""Transport between nodes by accelerator; all others use TCP."""
SCRIPTS: Mapping[str, str] = {
    RDMA: "/usr/local/gib/scripts/set_nccl_env.sh",
    TCPXO: "/usr/local/nvidia/lib64/nccl-env-profile.sh",
}
TIMEOUT = 30.0
LIBRARIES = "LD_LIBRARY_PATH"
"""Google's page on NCCL/gIB wants ``/usr/local/gib/lib64`` in it. It is unverified that Vertex AI puts it there."""
OF_THE_SHELL = ("_", "SHLVL", "PWD", "OLDPWD", "LC_CTYPE")
"""Variables that the shell, or Python as it starts, sets by itself."""
_SHOW = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"


def fabric_env(environ: Mapping[str, str], transport: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that ``transport``'s script sets (of `TRANSPORTS`, else none), and the node's log lines.

    A variable of ``environ`` keeps its value, which the image or an option has set, unless the script extends it. The
    folder of the plug-in goes in front of LD_LIBRARY_PATH, if the script has not put it there. A script that fails sets
    nothing, and training continues without it.
    """
    script = SCRIPTS.get(transport, "")
    if not script:
        return {}, []
    if not os.path.exists(script):
        return {}, [f"{transport}: this node has no {script}, so NCCL may use TCP, which is slower"]
    try:
        changed = _sourced(script, transport, environ)
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        why = " ".join(str(exc).split())[:300]
        return {}, [f"{transport}: {script} cannot be sourced, so NCCL may use TCP, which is slower: {why}"]
    new = {name: text for name, text in changed.items() if _extends(text, environ.get(name, ""))}
    folder = os.path.dirname(script) if transport == TCPXO else os.path.join(os.path.dirname(script), "../lib64")
    folder = os.path.normpath(folder)
    known = new.get(LIBRARIES, environ.get(LIBRARIES, ""))
    if os.path.isdir(folder) and folder not in known.split(":"):
        new[LIBRARIES] = f"{folder}:{known}".rstrip(":")
    kept = sorted(changed.keys() - new.keys())
    has = f"; {', '.join(kept)} stays as it was set before" if kept else ""
    return new, [f"{transport}: sourced {script}, which sets {', '.join(sorted(new)) or 'nothing new'}{has}"]


def _extends(text: str, before: str) -> bool:
    """Return True if ``text`` is a list (with colons or commas) that still has all of ``before``."""
    return set(re.split("[:,]", before)) - {""} <= set(re.split("[:,]", text))


def _sourced(script: str, transport: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the changes of ``script``, less `OF_THE_SHELL`. Raises `OSError`, `ValueError` or `SubprocessError`.

    A sourced script's status is that of its last line, often a test, so it is ignored.
    """
    shell = shutil.which("bash") or "/bin/sh"
    # Google's script for TCPXO takes the folder of the plug-in from this variable.
    before = {"NCCL_LIB_DIR": os.path.dirname(script), **environ} if transport == TCPXO else dict(environ)
    done = subprocess.run(
        [shell, "-c", '. "$1" >&2; exec "$2" -S -E -c "$3"', shell, script, sys.executable, _SHOW],
        env=before,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    try:
        after: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        after = {}
    changed = {n: text for n, text in after.items() if n not in OF_THE_SHELL and environ.get(n) != text}
    if changed.keys() <= before.keys() - environ.keys():
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ValueError(last or (f"the shell ended with {done.returncode}" if not after else "it sets nothing"))
    return changed
