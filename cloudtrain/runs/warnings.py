"""Warn about a plan: GPUs without a rank, secrets that would be recorded, unknown machines. Pure."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import scrubbed
from ..job.job import Gpu, misspelt_placeholders
from ..provider_api import catalog
from ..provider_api.limits import THIS_MACHINE, gpus_per_node
from ..validate import did_you_mean

if TYPE_CHECKING:
    from ..job.job import Job
    from ..provider_api.protocol import Request

_SECRET = re.compile(
    r"(?<![a-z])(secret|token|[a-z]*passwords?|[a-z]*passwd|pwd|pat|passphrase|credentials?|connection ?string"
    r"|(api|access|private|secret|account|auth) ?keys?|sas|dsn|cookie)(?![a-z])",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"(gh[pousr]_|github_pat_|hf_|sk-|xox[abp]-|AKIA|ASIA|AIza|glpat-|eyJ)[\w.-]{12,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
"""Prefixes of tokens of GitHub, Hugging Face, OpenAI, Slack, AWS, Google and GitLab; a JWT; a private key."""
_KEY = re.compile(r"(?![~./])[\w.+/=-]{12,}")
"""Text that may be a key, if an argument has such a name: ``pad_token`` is a word between signs."""
_PLAIN = re.compile(r"|true|false|yes|no|none|[\d.]+|[~./{].*", re.IGNORECASE)
"""Values that are not secret under any name: a switch, a number, a path, a placeholder."""


def is_secret_name(name: str) -> bool:
    """Return whether a variable, field or flag of this name holds a secret: ``WANDB_API_KEY``, ``HFToken``."""
    # Split ``HFToken`` into ``HF Token``.
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).replace("_", " ").replace("-", " ")
    return _SECRET.search(words) is not None


def cautions(job: Job, request: Request) -> Iterator[str]:
    """Yield a warning for each part of the request that wastes money or exposes a secret."""
    nodes, ranks = job.resources.instance_count, int(request.context["processes"])
    gpus = total_gpus(job, request)
    if job.launcher == "torchrun" and gpus and gpus > nodes * ranks:
        yield f"{gpus - nodes * ranks} of {gpus} GPUs have no rank (nproc_per_node = {ranks})"
    if job.min_gpu_util and gpus == 0 and request.instance_types and request.provider in catalog.providers():
        yield f"min_gpu_util has no effect: {request.instance_types[0]} has no GPU; ask for one with --gpu"
    for name, value in job.env.items():
        named = is_secret_name(name) and not _PLAIN.fullmatch(value)
        if named or _TOKEN.match(value) or scrubbed(value) != value:
            yield f"env.{name} looks like a secret and will be recorded; use --secret {name}"
    for field, name, value in _arguments(job):
        named = is_secret_name(name) and _KEY.fullmatch(value) is not None
        if named or _TOKEN.match(value) or scrubbed(value) != value:
            wanted = re.sub(r"\W", "_", name).upper() or "NAME"
            yield f"{field} looks like a secret and will be recorded; use --secret {wanted}, and read that variable"
    for name, item in job.inputs.items():
        if scrubbed(item.url) != item.url:
            yield f"inputs.{name} holds a password, key or signature, which will be recorded"
    yield from misspelt_placeholders(job)
    yield from _webhook_cautions(job)
    machine = job.resources.instance_type
    if machine and request.instance_types and request.provider in catalog.providers():
        known = [m.instance_type for m in catalog.machines(request.provider)]
        if machine.lower() not in {name.lower() for name in known}:
            near = did_you_mean(machine, known)
            yield f"{machine} is not in cloudtrain's table of machines, and is sent as it is" + (near and f"; {near}")


def _arguments(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield the field, the name and the value of each text among the script's arguments."""
    yield from (
        (f"hyperparameters.{k}", k, value) for k, value in job.hyperparameters.items() if isinstance(value, str)
    )
    for i, text in enumerate(job.args):
        before = job.args[i - 1] if i and "=" not in job.args[i - 1] else ""
        flag, equals, value = text.partition("=") if text.startswith("-") else (before, "=", text)
        is_value = flag.startswith("-") and equals  # --use-auth-token alone is a name
        yield f"args[{i}]", flag.lstrip("-") if is_value else "", value if equals else text


def _webhook_cautions(job: Job) -> Iterator[str]:
    if job.webhook_headers and not job.webhook:
        yield "webhook_headers are not used, because the job has no webhook"
    for name, value in job.webhook_headers.items():
        if "{secrets." not in value and (name.lower() == "authorization" or is_secret_name(name)):
            yield f"webhook_headers.{name} looks like a secret and will be recorded; write {{secrets.NAME}}"
    if (job.webhook or "").startswith("http:") and any("{secrets." in text for text in job.webhook_headers.values()):
        yield f"the webhook's secret goes to {scrubbed(str(job.webhook))} without encryption; use https"


def total_gpus(job: Job, request: Request) -> int | None:
    """Return the GPUs of all nodes, or None if the table lacks the machine."""
    machine = (request.instance_types or (THIS_MACHINE,))[0]
    count = gpus_per_node(request.provider, machine, job, request.gpu_index)
    return None if count is None else count * job.resources.instance_count


def gpu_memory_texts(job: Job, request: Request) -> list[str]:
    """Return the GPUs of a node with their memory, once for each machine that the platform may choose.

    A machine to which GPUs can be attached has none unless the job asks for them.
    """
    if total_gpus(job, request) == 0:
        return []
    found = []
    for name in request.instance_types:
        _, _, attached = name.partition("+")
        machine = catalog.machine(request.provider, name)
        found.append(attached or (machine.gpus if machine else ""))
    return list(dict.fromkeys(filter(None, found))) or list(job.resources.gpu[request.gpu_index :][:1])


def gpu_memory_gib(provider: str, names: Iterable[str]) -> float | None:
    """Return the memory of one GPU of `gpu_memory_texts`; None if it is unknown, or not the same for all ``names``."""
    known = {m.gpus: m.gpu_memory_gib for m in catalog.machines(provider)}
    found = {known.get(name) or Gpu.parse(name).memory_gb for name in names}
    return float(each) if len(found) == 1 and (each := found.pop()) else None


def memory_notes(job: Job, request: Request) -> Iterator[str]:
    """Yield a line if the job's GPU names no memory, exists with several, and the smallest was chosen."""
    if job.resources.gpu and not job.resources.instance_type:
        wish, names = job.resources.gpus[request.gpu_index], gpu_memory_texts(job, request)
        others = [name for name in catalog.variants(request.provider, wish) if name not in names]
        if wish.memory_gb is None and others and names:
            yield f"{wish} is {names[0]} here; for more memory write {' or '.join(others)}"


# ------------------------------------------------------------------------------------ appends to a mounted object store


def append_cautions(files: Iterable[tuple[str, Path]], places: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each call in ``files`` (name, path) that opens a file to append to it, or to change a part.

    Only a call that names one of ``places`` counts: a folder (``/mnt/``), or a variable that holds one.
    """
    for name, path in files:
        try:
            text = path.read_bytes()
            if not any(place.encode() in text for place in places):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # a script that cannot be read or parsed is refused elsewhere
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            mode = _mode(call)
            if ("a" in mode or "+" in mode) and "w" not in mode and any(place in ast.unparse(call) for place in places):
                why = "the platform mounts an object store there, which writes the whole object again or refuses"
                yield f"{name}:{call.lineno}: opens a file below {places[0]} with mode {mode!r}; {why}"


def _mode(call: ast.Call) -> str:
    """Return the literal mode of ``open(path, mode)`` or ``path.open(mode)``; empty for any other call."""
    function, at = call.func, 1
    if isinstance(function, ast.Attribute) and function.attr == "open":
        at = 1 if isinstance(function.value, ast.Name) and function.value.id in ("io", "os", "builtins") else 0
    elif not (isinstance(function, ast.Name) and function.id == "open"):
        return ""
    given = [item.value for item in call.keywords if item.arg == "mode"] or call.args[at : at + 1]
    value = given[0].value if given and isinstance(given[0], ast.Constant) else ""
    return value if isinstance(value, str) and re.fullmatch(r"[rwxabt+U]{1,4}", value) else ""
