"""The verb init: write the three files that a folder of jobs starts with, and show the doctor's findings.

With ``--examples``, it also writes the entry points and examples: a clone has them, and an installation below share/.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import SpecError
from ..job.job import Job
from ..provider_api.protocol import needs_of
from ..provider_api.registry import find_provider, provider_names
from ..runs.summary import plural
from ..settings.needs import assignment, find_missing
from ..settings.settings import FILE, Settings
from ..storage.files import files as open_files
from ..validate import did_you_mean, url_scheme
from .common_flags import HERE, At, Where
from .doctor import looked
from .output import Screen
from .runs import Json, Ours
from .submit import Provider, Set, settings_pairs

JOB, IGNORE, SCRIPT = "job.toml", ".cloudtrainignore", "train.py"
EXAMPLE_FOLDERS, SHARE = ("entrypoints", "examples"), "share/cloudtrain/"
EXAMPLE, EXAMPLE_DATA = "entrypoints/ddp.py", "examples/data/digits.csv.gz"
IGNORED = """\
# What does not ship with your code, in the syntax of .gitignore. cloudtrain plan lists what ships.
lightning_logs/
mlruns/
wandb/
"""


def init(
    script: Annotated[str | None, Parameter(help="your script; default: the only one here, train.py")] = None,
    /,
    *,
    provider: Provider = None,
    image: Annotated[str | None, Parameter(help="image for job.toml")] = None,
    examples: Annotated[
        bool, Parameter(negative="", help="also write entrypoints/ and examples/ with their data")
    ] = False,
    at: At = HERE,
    settings: Set = None,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Write the missing files, ask for missing settings on a terminal, and show the doctor's findings."""
    from ..doctor.doctor import checked_places

    cwd, given = Path.cwd(), settings_pairs(settings)
    kept = at.settings(overrides=given, cwd=cwd, provider=provider).file  # answers could not be written there
    asks = sys.stdin.isatty() and screen.err.isatty() and not screen.json and not kept
    if provider is None and asks:
        provider = _asked_provider(screen)
    chosen = at.settings(overrides=given, cwd=cwd, provider=provider)
    shipped = _examples() if examples else {}
    fields = {"inputs": {"train": EXAMPLE_DATA}} if examples and script is None else {}
    script = script or (EXAMPLE if examples else _script(cwd))
    job = Job.make(entry_point=script, **fields, **({"image": image} if image else {}))
    values = _given(chosen, given, at)
    missing = find_missing(chosen, chosen.make_provider(), job.at(chosen.provider))
    if asks:
        answers = _asked(chosen, missing, screen)
        job = job.replace(image=answers.pop("image")) if "image" in answers else job
        values |= answers
    home = os.path.relpath(kept, cwd) if kept else FILE
    texts = {home: _settings_text(chosen, values), JOB: _job_text(chosen.provider, job), IGNORE: IGNORED}
    files = shipped | {name: text.encode() for name, text in texts.items()}
    rows = [{"path": name, "status": _written(cwd / name, content)} for name, content in files.items()]
    is_there = (cwd / str(job.source.entry_point)).exists()
    if not screen.json:
        folders = Counter((row["status"], row["path"].partition("/")[0]) for row in rows if row["path"] in shipped)
        for (status, folder), count in folders.items():
            screen.talk(f"{status} {folder}/ ({plural(count, 'file')})")
        for row in rows[len(shipped) :]:
            screen.talk(f"{row['status']} {row['path']}")
        if not is_there:
            screen.talk(f"note: there is no {job.source.entry_point} here yet")
    where: dict[str, Any] = {"provider": chosen.provider, "store": at.store, "profile": at.profile}
    places = checked_places(**where, settings=given, fields={}, cwd=cwd, job=job if is_there else None)
    found = looked(places, screen)
    if screen.json:
        checks = [dataclasses.asdict(check) for _, some in found for check in some]
        now = at.settings(overrides=given, cwd=cwd, provider=chosen.provider)  # of the new file
        left = list(find_missing(now, now.make_provider(), job.at(chosen.provider)))
        screen.emit({"provider": chosen.provider, "files": rows, "missing": left, "checks": checks, "exit_code": 0})
    else:
        screen.next(["plan", JOB], where=at.flags if kept else ())
    return 0


def _script(cwd: Path) -> str:
    """Return the only script here, or the usual name."""
    names = [path.name for path in cwd.glob("*.py")]
    return names[0] if len(names) == 1 else SCRIPT


def _examples() -> dict[str, bytes]:
    """Return the entry points and examples, by their path in the repository.

    Raises `SpecError` if this installation has none.
    """
    own, clone = metadata.distribution("cloudtrain"), Path(__file__).parents[2]
    found = {name: Path(str(file.locate())) for file in own.files or [] if (name := str(file).partition(SHARE)[2])}
    if not found and (clone / EXAMPLE).exists():  # an editable installation has no share/
        paths = [path for folder in EXAMPLE_FOLDERS for path in sorted((clone / folder).rglob("*"))]
        found = {path.relative_to(clone).as_posix(): path for path in paths if path.is_file()}
    if not found:
        raise SpecError("this installation has no examples", field="examples", hint="install cloudtrain's wheel")
    return {name: path.read_bytes() for name, path in found.items() if path.suffix != ".pyc"}


def _given(chosen: Settings, given: Mapping[str, str], at: Where) -> dict[str, Any]:
    """Return the settings of the command line, by name as `cloudtrain config` shows it."""
    own = {f"{chosen.provider}.{key}": item.value for key, item in chosen.of_provider(chosen.provider).items()}
    values = {name: value for name, value in own.items() if {name, name.partition(".")[2]} & set(given)}
    values |= {name: getattr(chosen, name) for name in given if name in Settings.__dataclass_fields__}
    return values | ({"store": chosen.store} if at.store else {})


# ------------------------------------------------------------------------------------------------------------- asking


def _asked_provider(screen: Screen) -> str:
    names = provider_names()
    while True:
        word = _answer(f"provider, one of {', '.join(names)}", Settings.provider, screen)
        if not word or word in names:
            return word or Settings.provider
        screen.talk(" ".join(filter(None, [f"there is no provider {word!r};", did_you_mean(word, names)])))


def _asked(chosen: Settings, missing: tuple[str, ...], screen: Screen) -> dict[str, str]:
    """Return the answers by name, without settings that the user left for later."""
    found, needs = dict[str, str](), needs_of(find_provider(chosen.provider))
    for name in missing:
        need, key = needs[name], name.rpartition(".")[2]
        while word := _answer(f"{name}, such as {need.example} ({need.find})", "later", screen):
            try:
                if name == "store" and url_scheme(word) != url_scheme(need.example):
                    raise SpecError(f"{word!r} is not of the form {need.example}", field="store")
                if name not in ("store", "image"):
                    chosen.make_provider(**{key: word})
            except SpecError as exc:
                screen.error(str(exc), exc.hint)
            else:
                found[name] = word
                break
    return found


def _answer(question: str, default: str, screen: Screen) -> str:
    screen.err.write(f"{question}\n  [Enter: {default}] ")
    screen.err.flush()
    return sys.stdin.readline().strip()


# ------------------------------------------------------------------------------------------------------------ writing


def _settings_text(chosen: Settings, values: Mapping[str, Any]) -> str:
    """Return cloudtrain.toml: values that are set, and missing ones as comments with an example."""
    needs = needs_of(find_provider(chosen.provider))
    general = {"provider": chosen.provider, **{name: value for name, value in values.items() if "." not in name}}
    own = {name: value for name, value in values.items() if "." in name}
    later = [name for name in needs if name not in values and name != "image"]
    lines = ["# Settings for this folder and those below it. All of them: cloudtrain config", *_lines(general)]
    lines += [f"# {assignment(name, needs[name])}" for name in later if "." not in name]
    if own or any("." in name for name in later):
        header, *rest = _lines({chosen.provider: {name.partition(".")[2]: value for name, value in own.items()}})
        lines += [
            "",
            header,
            *(f"# {assignment(name.partition('.')[2], needs[name])}" for name in later if "." in name),
        ]
        lines += rest
    return "\n".join(lines) + "\n"


def _job_text(provider: str, job: Job) -> str:
    need = needs_of(find_provider(provider)).get("image")
    lines = ["# The job: cloudtrain submit job.toml", *_lines({"entry_point": job.source.entry_point})]
    lines += _lines({"image": job.image}) if job.image else [f"# {assignment('image', need)}"] if need else []
    lines += ["", "[resources]", "instance_count = 1", '# gpu = "A100-80GB:8"  # cloudtrain gpus lists them']
    if job.inputs:
        lines += ["", *_lines({"inputs": {name: channel.url for name, channel in job.inputs.items()}})]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    import tomli_w

    return tomli_w.dumps(values).splitlines()


def _written(path: Path, content: bytes) -> str:
    """Write the file unless it exists; return ``wrote`` or ``kept``."""
    return "wrote" if open_files(str(path.parent)).create(path.name, content) else "kept"
