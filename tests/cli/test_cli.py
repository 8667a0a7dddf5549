"""The command line: flags of a Job, refusals, the output rules, and whole runs of the real console script."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import called
from profiles import PROFILE, examples
from rows import for_each

from cloudtrain import cli
from cloudtrain.cli import advice, flags, format, key_value
from cloudtrain.cli.output import Screen
from cloudtrain.cli.submit import NO_DESCRIPTION
from cloudtrain.errors import SpecError
from cloudtrain.job.job import FLAT_FIELDS, Job
from cloudtrain.runs.outcome import iso_time
from cloudtrain.store.store import Staged

CLI = [sys.executable, "-m", "cloudtrain"]


def job_of(*argv: str, cwd: Path = Path()) -> Job:
    """Return the Job of ``cloudtrain submit ARGV``, without sending it."""
    tokens, args = cli.split(["submit", *argv])
    call = cli.parse(tokens, args, Screen(io.StringIO(), io.StringIO()))
    script = call.args[0] if call.args else None
    given = call.keywords.get("description", NO_DESCRIPTION)
    return flags.job_of(script, given.module, given.flags, call.keywords["args"], cwd=cwd)


def run_cli(*argv: str, cwd: Path, script: bool = PROFILE == "proof") -> subprocess.CompletedProcess[str]:
    """Run the command in this process, or by the console ``script``."""
    if script:
        return subprocess.run([*CLI, *argv], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    done = called(*argv, cwd=cwd)
    return subprocess.CompletedProcess([*CLI, *argv], done.code, done.out, done.err)


def main_of(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


# ----------------------------------------------------------------------------------------------------- flags and fields


def test_every_field_of_a_job_has_its_flag_and_no_flag_is_anything_else() -> None:
    tokens = ["submit", "t.py"]
    call = cli.parse(tokens, None, Screen(io.StringIO(), io.StringIO()))
    assert set(flags.JobFlags.__dataclass_fields__) == set(FLAT_FIELDS) - set(flags.NOT_FLAGS)
    assert set(flags.SPELLINGS) <= set(FLAT_FIELDS)
    assert set(flags.JobFlags.__dataclass_fields__) <= {flat for fields in flags.FORMS.values() for flat in fields}
    assert call.args == ("t.py",)


EXAMPLES: dict[str, tuple[str, Any]] = {
    "name": ("n1", "n1"),
    "image": ("repo/img:1", "repo/img:1"),
    "launcher": ("python", "python"),
    "hyperparameters": ("lr=1.10", {"lr": "1.10"}),
    "hyperparameter_style": ("hydra", "hydra"),
    "env": ("A=1=2", {"A": "1=2"}),
    "secrets": ("TOKEN", {"TOKEN": "env:TOKEN"}),
    "inputs": ("train=s3://b/d?x=1", {"train": "s3://b/d?x=1"}),
    "max_runtime": ("12h", 43200),
    "max_wait": ("90", 90),
    "max_cost": ("12.5", 12.5),
    "max_gpu_hours": ("64", 64.0),
    "retries": ("2", 2),
    "stall_timeout": ("0", 0),
    "min_gpu_util": (" 5 %  for 30m", "5% for 30m"),
    "node_check": ("", True),
    "keep_warm": ("30m", 1800),
    "interactive": ("", True),
    "debug_nccl": ("", True),
    "resume_from": ("run-1", "run-1"),
    "checkpoint_paths": ("ck/*.pt", ("ck/*.pt",)),
    "keep_checkpoints": ("3", 3),
    "webhook": ("https://h/x", "https://h/x"),
    "webhook_headers": ("X-Key=a", {"X-Key": "a"}),
    "metrics": ("loss=loss=([0-9.]+)", {"loss": "loss=([0-9.]+)"}),
    "outputs": ("", True),
    "max_outputs": ("2GB", 2_000_000_000),
    "tags": ("team=a b", {"team": "a b"}),
    "options": ('p.a.b={"c": [1]}', {"p": {"a": {"b": {"c": [1]}}}}),
    "on": ("p.instance_count=4", {"p": {"instance_count": 4}}),
    "source_dir": ("src", "src"),
    "entry_point": ("x.py", "x.py"),
    "dependencies": ("../lib", ("../lib",)),
    "requirements": ("req.txt", "req.txt"),
    "exclude": ("*.bin", ("*.bin",)),
    "instance_count": ("3", 3),
    "instance_type": ("ml.g5", "ml.g5"),
    "gpu": ("H100:8", ("H100:8",)),
    "total_gpus": ("16", 16),
    "gpu_memory": ("8GB", 8 * 10**9),
    "nproc_per_node": ("2", 2),
    "cpus": ("4", 4),
    "memory_gb": ("16", 16),
    "disk_gb": ("100", 100),
    "shm_gb": ("8", 8),
    "spot": ("", True),
}


@pytest.mark.slow
@for_each("flat", [f for f in FLAT_FIELDS if f not in flags.NOT_FLAGS])
def test_each_flag_sets_its_field(flat: str) -> None:
    text, value = EXAMPLES[flat]
    for flag in flags.flag_names(flat):
        script = [] if flat == "entry_point" else ["t.py"]
        job = job_of(*script, flag, *([text] if text else []))
        owner, name = FLAT_FIELDS[flat]
        found = getattr(getattr(job, owner) if owner else job, name)
        if flat == "inputs":
            found = {k: v.url for k, v in found.items()}
        assert found == value


@functools.cache
def shown_flags() -> set[str]:
    """Return the flags of all verbs."""
    app = cli.make_app()
    return {name for verb in cli.VERBS for item in app[verb].assemble_argument_collection() for name in item.names}


@for_each(("second", "first"), key_value.ALIASES.items())
def test_a_second_spelling_is_read_as_the_first_and_shown_nowhere(second: str, first: str) -> None:
    assert key_value.first_spelling(second) == first
    assert key_value.first_spelling(f"{second.replace('-', '_').replace('__', '--')}=a-b") == f"{first}=a-b"
    assert first in shown_flags()
    assert second not in shown_flags()


def test_repeated_tables_merge_and_repeated_lists_append() -> None:
    job = job_of("t.py", "--hp", "a=1", "--hp", "b=2", "--hp", "a=3", "--gpu", "H100:8", "--gpu", "A100-80GB:4")
    assert job.hyperparameters == {"a": "3", "b": "2"}
    assert job.resources.gpu == ("H100:8", "A100-80GB:4")


def test_dotted_tables() -> None:
    job = job_of("t.py", "--env.A", "--json", "--env.B=x=y", "--hp.model.dim", "-3", "--secret.T", "env:U")
    assert job.env == {"A": "--json", "B": "x=y"}
    assert job.hyperparameters == {"model.dim": "-3"}
    assert job.secrets == {"T": "env:U"}


def test_options_are_json_where_they_are_json() -> None:
    job = job_of(
        "t.py", "--option", "p.a.b=1", "--option", "p.a.c=text", "--option", 'p={"x.y": true}', "--option", "q.z=NaN"
    )
    assert job.options == {"p": {"a": {"b": 1, "c": "text"}, "x.y": True}, "q": {"z": "NaN"}}


def test_module_and_script_are_one_thing() -> None:
    assert job_of("-m", "pkg.mod").source.entry_point == "-m pkg.mod"
    with pytest.raises(SpecError, match="two scripts"):
        job_of("t.py", "-m", "pkg.mod")


def test_all_after_the_first_double_dash_is_the_scripts() -> None:
    args = ["--log", "x", "", "a\nb", "--", "--json", "--help", "--env.A", "-m"]
    job = job_of("t.py", "--hp", "a=1", "--", *args)
    assert job.args == tuple(args)
    assert job_of("t.py", "--").args == ()


def test_a_job_file_and_flags_over_it(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        'name = "base"\nargs = ["old"]\n[source]\nentry_point = "t.py"\n[hyperparameters]\nlr = 0.1\nsteps = 5\n'
        '[resources]\ninstance_count = 2\ngpu = ["H100:8"]\n[inputs]\ntrain = "data"\n[options.p.a]\nb = 1\n'
    )
    job = job_of("job.toml", "--nodes", "4", "--hp", "lr=1", "--option", "p.a.c=2", "--", "new", cwd=tmp_path)
    assert job.resources.instance_count == 4
    assert job.resources.gpu == ("H100:8",)
    assert job.hyperparameters == {"lr": "1", "steps": 5}
    assert job.options == {"p": {"a": {"b": 1, "c": 2}}}
    assert job.args == ("new",)
    assert job.inputs["train"].url == "data"
    assert job_of("job.toml", cwd=tmp_path).args == ("old",)


def test_a_json_job_file_is_read_like_a_toml_one(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    job = Job.make(entry_point="t.py", instance_count=2, inputs={"train": "data"})
    (tmp_path / "sub/job.json").write_text(job.to_json())
    read = job_of("sub/job.json", "--gpu", "H100:8", cwd=tmp_path)
    assert read.source.path == "sub"
    assert read.inputs["train"].url == "sub/data"
    assert (read.resources.instance_count, read.resources.gpu) == (2, ("H100:8",))


def test_flags_can_complete_a_job_file_that_has_no_script(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('launcher = "python"\n')
    assert job_of("job.toml", "-m", "pkg.mod", cwd=tmp_path).source.module == "pkg.mod"


# No NUL, no surrogates: no process can be given them.
TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=40)
ODD = TEXT | st.sampled_from(
    ["--json", "--", "-m", "--help", "=", "[1]", '["a"]', "none", "null", "{", '{"a": 1}', "\n", " ", "-1", "1.10"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KEY = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).map(lambda k: f"X{k}")


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    env=st.dictionaries(KEY, ODD, max_size=3),
    hp=st.dictionaries(KEY, ODD, max_size=3),
    args=st.lists(ODD, max_size=4),
    dotted=st.booleans(),
)
def test_strange_text_reaches_the_job_unchanged(
    env: dict[str, str], hp: dict[str, str], args: list[str], dotted: bool
) -> None:
    argv = ["t.py"]
    for flag, table in (("--env", env), ("--hp", hp)):
        for key, value in table.items():
            if dotted and value != "--":  # which ends our flags wherever it stands by itself
                argv += [f"{flag}.{key}", value]
            else:
                argv += [flag, f"{key}={value}"]
    job = job_of(*argv, "--", *args)
    assert (job.env, job.hyperparameters, list(job.args)) == (env, hp, args)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(value=JSON)
def test_any_json_value_reaches_options(value: Any) -> None:
    assert job_of("t.py", "--option", f"p.a={json.dumps(value)}").options == {"p": {"a": value}}


def test_undot_leaves_everything_else_alone() -> None:
    tokens = ["submit", "a.py", "--env", "A=1", "--name", "x.y", "--environ.x", "1", "--env.A"]
    assert key_value.undot(tokens) == tokens


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["submit", "t.py", "--gup", "H100"], "--gpu"),
        (["submit", "t.py", "--epochs", "3"], "submit t.py -- --epochs 3"),
        (["submit", "t.py", "--step", "3"], "use --store; or"),
        (["submit", "t.py", "--dry-run", "--nodes", "2"], "cloudtrain plan t.py --nodes 2"),
        (["status", "--instance-cuont"], "no flag --instance-cuont"),
        (["submit", "t.py", "--env", "A"], "NAME=VALUE"),
        (["submit", "t.py", "--nodes", "x"], "resources.instance_count"),
        (["submit", "t.py", "--nodes"], "--nodes requires an argument"),
        (["submit", "t.py", "--max-runtime", "soon"], "max_runtime"),
        (["submit", "t.py", "--launcher", "torchrn"], "torchrun"),
        (["submit", "t.py", "--set", "x"], "--set"),
        (["submit", "t.py", "--option", "p=1"], "PROVIDER.PATH"),
        (["submit"], "no script"),
        (["submit", "none.toml"], "none.toml"),
        (["submit", "t.py", "--plan", "x.json"], "saved plan"),
        (["submt"], "submit"),
        (["wait"], "RUN requires an argument"),
        (["status"], "no run in"),
        (["wait", "a", "b"], "unexpected 'b'"),
        (["pull", "a", "b", "c"], "--out"),
        (["gc", "s1", "--store", "s2"], "two stores"),
        (["--nodes", "2", "submit"], "before the verb"),
        (["status", "a", "--", "b"], "nothing after '--'"),
        (["pull", "r", "--what", "checkpoint"], "checkpoints"),
        (["pull", "r", "--what", "checkpoints:newest"], ":latest, :best, :step=N"),
        (["pull", "r", "--what", "logs:latest"], "'logs:latest'"),
        (["pull", "r", "--only", "logs:latest"], "'logs:latest'"),
        (["wait", "r", "--timeout", "x"], "timeout"),
        (["logs", "r", "--node", "x"], "--node"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_refused_command_line_is_one_line_and_exit_2(
    argv: list[str],
    says: str,
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    at = 1 if "--" in argv else len(argv)
    code, out, err = main_of(*argv[:at], *(["--json"] if as_json else []), *argv[at:], capsys=capsys)
    assert code == 2
    assert says in err
    assert err.startswith("error: ")
    first, *rest = err.splitlines()
    assert [line for line in rest if not line.startswith(("hint: ", "      "))] == []
    assert list(tmp_path.iterdir()) == []
    if as_json:
        answer = json.loads(out)
        assert answer["exit_code"] == 2
        assert answer["error"] in first
        assert says in f"{answer['error']} {answer['hint']}"
    else:
        assert out == ""


@pytest.mark.parametrize("verb", ["submit", "plan", "rehearse"])
def test_a_job_file_that_is_here_but_not_named_is_the_hint(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('entry_point = "train.py"\n')
    code, _, err = main_of(verb, "--gpu", "H100", capsys=capsys)
    assert (code, err.splitlines()) == (2, [
        "error: source.entry_point: no script and no job file",
        "hint: to use job.toml, put it after the verb, as in: cloudtrain submit job.toml",
    ])  # fmt: skip
    assert "no script and no job file" not in main_of(verb, "train.txt", capsys=capsys)[2]
    assert main_of("plan", "--launcher", "command", "--", "true", capsys=capsys)[0] == 0


def test_unforeseen_errors_are_one_line_and_exit_9(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(cli, "parse", explode)
    code, out, err = main_of("list", "--json", capsys=capsys)
    assert code == 9
    assert err == f"error: {json.loads(out)['error']}\nhint: {json.loads(out)['hint']}\n"
    assert "RuntimeError: two lines" in err
    assert "CLOUDTRAIN_DEBUG=1" in err
    assert "bug in cloudtrain" in err
    monkeypatch.setenv("CLOUDTRAIN_DEBUG", "1")
    assert "Traceback" in main_of("list", capsys=capsys)[2]


def test_a_bug_may_be_in_a_provider_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "queue-1.dist-info").mkdir()
    (tmp_path / "queue-1.dist-info/entry_points.txt").write_text("[cloudtrain.providers]\nqueue = our_queue:Provider\n")
    (tmp_path / "our_queue.py").write_text("import not_installed_sdk\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = main_of("config", "--provider", "queue", capsys=capsys)
    assert (code, err.splitlines()[0]) == (
        9, "error: ModuleNotFoundError: No module named 'not_installed_sdk'; "
        "this is a bug in cloudtrain or your provider queue",
    )  # fmt: skip


@pytest.mark.costly
def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = main_of("--help", capsys=capsys)
    assert code == 0
    assert all(verb in out for verb in cli.VERBS)
    code, out, _ = main_of("--version", capsys=capsys)
    assert (code, out.count("\n")) == (0, 1)
    for verb in cli.VERBS:
        code, out, _ = main_of(verb, "--help", capsys=capsys)
        assert code == 0
        assert "--json" in out or verb in ("completion", "shell", "tensorboard")  # another program's output


@pytest.mark.slow
def test_help_has_groups_types_and_an_example_for_each_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        assert (
            " ".join(main_of("help", verb, capsys=capsys)[1].split()).count(f"cloudtrain {cli.VERBS[verb].example}")
            >= 1
        )
        tokens, args = cli.split(shlex.split(cli.VERBS[verb].example.partition(" > ")[0]))
        assert cli.parse(tokens, args, Screen(io.StringIO(), io.StringIO()))
    whole = main_of("help", capsys=capsys)[1]
    assert whole == main_of(capsys=capsys)[1]
    assert [whole.index(f"\n{name}:") for name in ("Run", "Look", "Check", "Tidy")]
    submit = main_of("submit", "--help", capsys=capsys)[1]
    places = [submit.index(f" {name} ──") for name in ("Job", "Machines", "Data", "Limits", "Resume", "Client")]
    assert places == sorted(places)
    assert "--nodes -n INT" in submit
    assert "--max-runtime DURATION" in submit
    assert " STR" not in submit


@for_each(
    ("word", "hint"),
    [
        ("stop", "did you mean: cloudtrain cancel"),
        ("sumbit", "did you mean: cloudtrain submit"),
        ("my train.py", "to send it, run: cloudtrain submit 'my train.py' --nodes 2"),
        ("xyzzy", "to list all verbs, run: cloudtrain --help"),
    ],
)
def test_a_word_that_is_no_verb_gets_a_hint(word: str, hint: str) -> None:
    assert advice.about_verb(word, cli.VERBS, ["--nodes", "2"]) == hint


def test_the_words_of_other_tools_are_no_verbs_of_ours() -> None:
    assert not set(advice.HINTS) & {*cli.VERBS, *cli.ALSO}
    assert {text.split()[4] for text in advice.HINTS.values() if text.startswith("did you mean")} <= {
        *cli.VERBS, "--version"
    }  # fmt: skip


#: Modules that a verb loads here. Each further module makes every call slower.
HELP = "_version cli cli.key_value cli.output errors storage storage.errors "
STATUS = f"""{HELP}
    cli.common_flags cli.format cli.runs job job.fields job.run_id provider_api provider_api.launch_spec
    provider_api.node provider_api.protocol provider_api.registry runs runs.metrics runs.outcome runs.summary runtime
    runtime.checkpoint_model runtime.checkpoint_names settings settings.coerce settings.settings storage.files
    storage.lease storage.local_disk storage.timings store store.store validate """
LIST = f"{STATUS} runs.listing "
STATUS += """
    job.job provider_api.catalog provider_api.limits runs.attempts runs.cost runs.handover runs.log_order
    runs.log_sources runs.machines runs.max_wait runs.pull_kinds runs.resume_nodes runs.run runtime.segments """
PLAN = f"""{STATUS}
    cli.flags cli.submit engine engine.supervised estimator job.bundle job.entry_point job.ignore job.options
    job.own_files job.provenance job.shipped_files provider_api.node_count providers providers.local runs.fallback
    runs.deliver runs.retry runs.submit runs.warnings settings.needs storage.digest_cache store.runtime_zip """
#: Slow modules of the standard library and of other packages that none of these verbs needs.
SLOW = """
    aiohttp asyncio concurrent.futures difflib fsspec html http.client importlib.metadata logging numpy obstore pathspec
    shutil ssl tempfile torch urllib.request zipfile """
RESULT = {
    "run": "runs/r1", "run_id": "r1", "provider": "local", "native_id": "n", "state": "succeeded", "category": None,
    "exit_code": 0, "reason": "", "failure": None, "attempts": [], "checkpoint": None, "cost": {}, "name": "train",
    "created": 1.0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "ours", "slow"),
    [
        (["--help"], HELP, SLOW),
        (["list", "--json"], LIST, SLOW + "rich.console subprocess"),
        (["status", "r1"], STATUS, SLOW + "rich.console subprocess"),
        (["plan", "train.py", "--json"], PLAN, SLOW + "rich.console"),
    ],
    ids=lambda item: item[0] if isinstance(item, list) else "",
)
def test_a_cheap_verb_loads_these_modules_alone(argv: list[str], ours: str, slow: str, tmp_path: Path) -> None:
    for run_id in ("r1", "r2"):
        folder = tmp_path / ".cloudtrain" / "runs" / run_id
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(RESULT | {"run_id": run_id}))
        (folder / "run.json").write_text(json.dumps({"provider": "local", "settings": {}, "job": {}}))
    (tmp_path / "train.py").write_text("print('hello')\n")
    code = (
        "import json, sys; from cloudtrain import cli; code = cli.main(sys.argv[1:])\n"
        "print(json.dumps(list(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=tmp_path, capture_output=True, text=True, check=True,
        env=os.environ | {"CLOUDTRAIN_STORE": ".cloudtrain"},
    )  # fmt: skip
    loaded = set(json.loads(done.stderr.splitlines()[-1])) - set(bare.stdout.split())
    assert {name.partition(".")[2] for name in loaded if name.startswith("cloudtrain.")} - {*ours.split()} == set()
    assert loaded & {*slow.split()} == set()


# ----------------------------------------------------------------------------------------------------------------- text


@for_each(
    ("seconds", "text"), [(0, "0s"), (45, "45s"), (5400, "1h30m"), (86400, "24h"), (3 * 86400, "3d"), (3725, "1h2m")]
)
def test_durations_read_back(seconds: int, text: str) -> None:
    assert format.duration(seconds) == text


@for_each(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert format.size_text(count) == text


def test_bytes_that_move_are_told_with_rate_and_time_left() -> None:
    now, said = [100.0], list[str]()
    moved = format.Moved("uploaded", said.append, clock=lambda: now[0])
    moved.expect(3, 4 << 20)
    moved("a", 1 << 20)
    assert said == ["1 of 3 files, 1.0 MiB of 4.0 MiB uploaded"]
    now[0] += 0.05
    moved("a", 1)
    assert len(said) == 1, "not more than ten times a second"
    now[0] += 0.95
    moved("b", (1 << 20) - 1)
    assert said[1:] == ["2 of 3 files, 2.0 MiB of 4.0 MiB uploaded, 1.0 MiB/s, 2s left"]
    now[0] += 60
    moved("c", 1 << 20)
    now[0] += 0.5
    moved("c", 1 << 20)
    assert said[-1].endswith("3 of 3 files, 4.0 MiB of 4.0 MiB uploaded, 2.0 MiB/s, 0s left")
    moved("d", 1 << 20)
    now[0] += 1
    moved("d", 1 << 20)
    assert "4 of 4 files, 6.0 MiB of 6.0 MiB" in said[-1], "more than was expected is no mistake"
    assert moved.pace == ", in 1m2s, 98.3 KiB/s"


def test_where_nobody_watches_there_is_one_line_at_the_end() -> None:
    now = [5.0]
    moved = format.Moved("pulled", None, clock=lambda: now[0])
    assert moved.pace == ""
    moved("a", 10)
    assert moved.pace == "", "too early to know"
    now[0] += 2
    moved("a", 4 << 20)
    report = {"files": ["a"], "folder": "out", "transferred": 4 << 20}
    assert format.pulled(report, pace=moved.pace) == "pulled 1 file to out, 4.0 MiB of it new, in 2s, 2.0 MiB/s"


@for_each(
    ("seconds", "text"),
    [(5, "5 s ago"), (130, "2 min ago"), (7300, "2 h ago"), (90000, "25 h ago"), (3 * 86400, "3 days ago")],
)
def test_a_person_reads_how_long_ago_it_was(seconds: float, text: str) -> None:
    now = 1.7e9
    assert format.when(iso_time(now - seconds), now) == text
    assert format.when(iso_time(now - seconds), None) == iso_time(now - seconds), "a program reads the time"
    assert format.when(iso_time(now + 9), now) == iso_time(now + 9), "clocks differ"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_labels_and_states_have_colours_on_a_terminal_and_what_a_script_prints_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), Terminal()
    screen = Screen(out, err)
    screen.error("no", "do")
    screen.relay("error: of the script")
    screen.data("failed: of the script")
    screen.show("state  failed (oom): why\nname   failedx")
    screen.value("word")
    assert err.getvalue() == "\x1b[1;31merror:\x1b[0m no\n\x1b[36mhint:\x1b[0m do\nerror: of the script\n"
    assert out.getvalue() == "failed: of the script\nstate  \x1b[31mfailed\x1b[0m (oom): why\nname   failedx\n"
    monkeypatch.setenv("NO_COLOR", "1")
    screen.value("word", "r1: failed")
    screen.emit({"a": 1})
    assert out.getvalue().endswith('r1: failed\n{\n  "a": 1\n}\n')


# ------------------------------------------------------------------------------------- whole runs of the console script


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few scripts, and two runs in its store: ``good-1`` and ``bad-1``."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "good.py").write_text(
        "import json, os, sys\n"
        "print('GOT' + json.dumps([sys.argv[1:], os.environ.get('ODD')]), flush=True)\n"
        "open(os.path.join(os.environ['CLOUDTRAIN_ARTIFACT_DIR'], 'model.txt'), 'w').write('weights')\n"
    )
    (folder / "bad.py").write_text("print('before', flush=True)\nraise ValueError('THE CAUSE')\n")
    (folder / "long.py").write_text(
        "import os, time\n"
        "for i in range(600):\n"
        "    print(f'line {i}', flush=True)\n"
        "    time.sleep(0.05)\n"
        "    if os.path.exists(os.environ['CLOUDTRAIN_PREEMPT_FILE']):\n"
        "        break\n"
    )
    return folder


ODD_TEXT = 'it\'s "q" $HOME `id` \\ é {"a": {"b": 1}} {x}\nnl'


@pytest.fixture(scope="module")
def good(demo: Path) -> subprocess.CompletedProcess[str]:
    return run_cli(
        "submit", "good.py", "--run-id", "good-1", "--env", f"ODD={ODD_TEXT}", "--hp", f"msg={ODD_TEXT}",
        "--hp", "v=1.10", "--", "--log", "x", "", ODD_TEXT, cwd=demo, script=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bad(demo: Path) -> subprocess.CompletedProcess[str]:
    return run_cli("submit", "bad.py", "--run-id", "bad-1", "--json", "--pull", "out", "--max-runtime", "1h", cwd=demo)


@pytest.mark.slow
def test_submit_follows_to_the_end_and_strange_text_arrives(good: subprocess.CompletedProcess[str]) -> None:
    assert good.returncode == 0, good.stderr
    (line,) = [text for text in good.stdout.splitlines() if "GOT" in text]
    assert line.startswith("GOT")  # one rank: no prefix
    argv, odd = json.loads(line[3:])
    assert odd == ODD_TEXT
    assert argv.count(ODD_TEXT) == 2
    assert argv[-4:] == ["--log", "x", "", ODD_TEXT]
    assert "1.10" in argv
    assert "max_runtime 24h (default; --max-runtime)" in good.stderr
    assert "stall_timeout 30m (default; --stall-timeout)" in good.stderr
    assert "next: cloudtrain pull good-1" in good.stderr
    assert "--store" not in good.stderr


@pytest.mark.slow
def test_a_failed_run_is_one_object_with_its_cause(bad: subprocess.CompletedProcess[str], demo: Path) -> None:
    assert bad.returncode == 1, bad.stderr
    result = json.loads(bad.stdout)
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "user_error", 1)
    assert result["failure"]["rank"] == 0
    assert "THE CAUSE" in result["reason"]
    assert "before" in bad.stderr
    assert "Traceback" in bad.stderr
    assert "max_runtime" not in bad.stderr
    assert result["pulled"]["folder"] == "out"
    assert any((demo / "out").rglob("*.log"))


@pytest.mark.slow
def test_status_list_logs_wait_and_pull_of_a_run_that_is_over(
    good: subprocess.CompletedProcess[str], bad: subprocess.CompletedProcess[str], demo: Path
) -> None:
    status = run_cli("status", "bad-1", cwd=demo)
    assert status.returncode == 0, status.stderr
    assert "failed (user_error)" in status.stdout
    assert "rank 0" in status.stdout
    assert json.loads(run_cli("status", "good-1", "--json", cwd=demo).stdout)["state"] == "succeeded"
    listed = json.loads(run_cli("list", "--json", cwd=demo).stdout)
    assert {"good-1", "bad-1"} <= {run["run_id"] for run in listed["runs"]}
    assert "good-1" in run_cli("list", cwd=demo).stdout
    lines = [json.loads(text) for text in run_cli("logs", "bad-1", "--json", cwd=demo).stdout.splitlines()]
    assert "before" in [line["text"] for line in lines]
    assert run_cli("logs", "bad-1", "--node", "7", cwd=demo).stdout == ""
    waited = run_cli("wait", "bad-1", cwd=demo)
    assert (waited.returncode, waited.stdout) == (1, "failed\n")
    pulled = run_cli("pull", "good-1", "--what", "artifacts", "--json", cwd=demo)
    assert pulled.returncode == 0, pulled.stderr
    assert json.loads(pulled.stdout)["folder"] == "good-1"
    assert (demo / "good-1" / "artifacts" / "model.txt").read_text() == "weights"


EMPTY = "note: the run left no checkpoints, artifacts or outputs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "told"),
    [
        ("print()", [], f"{EMPTY}\nhint: let the script write below its working folder"),
        ("open('x', 'w').write('1')", ["--no-outputs"], f"{EMPTY} (outputs are off)\nhint: run without --no-outputs"),
        ("open('x', 'w').write('1')", [], ""),
    ],
)
def test_a_success_that_leaves_nothing_is_told_with_a_hint(
    tmp_path: Path, script: str, flags: list[str], told: str
) -> None:
    (tmp_path / "t.py").write_text(script)
    sent = run_cli("submit", "t.py", "--run-id", "r", *flags, "--json", cwd=tmp_path)
    waited = run_cli("wait", "r", cwd=tmp_path)
    assert (json.loads(sent.stdout)["state"], waited.stdout) == ("succeeded", "succeeded\n")
    for err in (sent.stderr, waited.stderr):
        assert (
            (told in err and "CLOUDTRAIN_CHECKPOINT_DIR or CLOUDTRAIN_ARTIFACT_DIR" in err)
            if told
            else (EMPTY not in err)
        ), err


@pytest.mark.slow
def test_a_run_is_found_by_its_url_from_anywhere(bad: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    url = json.loads(bad.stdout)["run"]
    assert json.loads(run_cli("status", url, "--json", cwd=tmp_path).stdout)["run_id"] == "bad-1"


@pytest.mark.parametrize(
    "verb", ["status", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("logs", "wait", "pull", "cancel"))]
)
def test_a_run_that_is_not_there_is_exit_2(verb: str, demo: Path) -> None:
    done = run_cli(verb, "nosuch-1", "--json", cwd=demo)
    assert done.returncode == 2, done.stderr
    assert "nosuch-1" in json.loads(done.stdout)["error"]
    assert done.stderr.count("\n") == 2


@pytest.mark.slow
def test_a_taken_run_id_is_exit_2_and_starts_nothing(good: subprocess.CompletedProcess[str], demo: Path) -> None:
    done = run_cli("submit", "bad.py", "--run-id", "good-1", "--json", cwd=demo)
    assert done.returncode == 2, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["field"], answer["run_id"]) == ("run_id", "good-1")


@pytest.mark.slow
def test_plan_is_the_same_twice_and_can_be_sent(demo: Path) -> None:
    argv = ["plan", "good.py", "--nodes", "2", "--hp", "lr=1.10", "--run-id", "planned-1"]
    first, second = (run_cli(*argv, "--json", cwd=demo) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    document = json.loads(first.stdout)
    text = run_cli(*argv, cwd=demo).stdout
    assert text == format.plan_text(document) + "\n"
    defaults = ("max_runtime 24h (default", "stall_timeout 30m (default")
    for part in ("good.py", document["code"]["digest"], *defaults, "2 nodes", "request", "context"):
        assert part in text
    (demo / "plan.json").write_text(first.stdout)
    refused = run_cli("submit", "--plan", "plan.json", "--hp", "a=1", cwd=demo)
    assert (refused.returncode, "hyperparameters" in refused.stderr) == (2, True)
    (demo / "plan.json").write_text(run_cli("plan", "good.py", "--exclude", "plan.json", "--json", cwd=demo).stdout)
    sent = run_cli("submit", "--plan", "plan.json", "--json", cwd=demo)
    assert sent.returncode == 0, sent.stderr
    assert json.loads(sent.stdout)["run_id"] == "good-plan"


@pytest.mark.parametrize(
    ("flags", "there", "absent"),
    [
        ([], ["sends", "to see the exact request"], ["request\n{", "context", "files ("]),
        (["--verbose"], ["files (", "sends"], ["request\n{"]),
        (["--request"], ["request\n{", "files (", "cloudtrain.pyz"], ["context\n"]),
    ],
)
def test_a_terminal_gets_the_summary_of_a_plan_last(
    demo: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], there: list[str], absent: list[str]
) -> None:
    monkeypatch.chdir(demo)
    out, err = io.StringIO(), io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    assert cli.parse(["plan", "good.py", *flags], None, Screen(out, err))() == 0
    text = out.getvalue() + err.getvalue()
    assert all(part in text for part in there), text
    assert not any(part in text for part in absent), text
    assert out.getvalue().rstrip().rpartition("\n")[2].split()[0] in ("sends", "note", "warning")
    assert "limits:" not in err.getvalue()


def test_a_long_list_of_files_is_cut_unless_verbose(demo: Path) -> None:
    document = json.loads(run_cli("plan", "good.py", "--json", cwd=demo).stdout)
    document["code"]["files"] = [{"path": f"f{i:03}\n", "bytes": i, "mode": "0644"} for i in range(50)]
    short, full = format.plan_text(document), format.plan_text(document, verbose=True)
    assert "… and 30 more (--verbose)" in short
    assert "f049\\n" in short
    assert "f000" not in short
    assert "f000" in full
    document["request"]["body"] = {"args": ["x" * 5000]}
    assert "x" * 5000 in format.plan_text(document)
    cut = format.plan_text(document, terminal=True)
    assert "x… (of 5,000 characters; --json shows all)" in cut
    assert len(cut) < 5000
    assert "more (--verbose)" not in full


@pytest.mark.slow
def test_ctrl_c_detaches_and_the_run_goes_on(demo: Path) -> None:
    process = subprocess.Popen(
        [*CLI, "submit", "long.py", "--run-id", "long-1", "--json"],
        cwd=demo, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell starts background commands with SIGINT ignored, and this suite may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert any(text.startswith("line 3") for text in process.stderr)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 7, err
    assert json.loads(out)["run_id"] == "long-1"
    assert json.loads(out).keys() == {"run", "run_id", "provider", "error", "field", "hint", "exit_code"}
    assert "cloudtrain logs -f long-1" in err
    assert json.loads(run_cli("status", "long-1", "--json", cwd=demo).stdout)["state"] == "running"
    waited = run_cli("wait", "long-1", "--timeout", "1s", "--json", cwd=demo)
    assert (waited.returncode, json.loads(waited.stdout)["exit_code"]) == (7, 7)
    head = subprocess.run(
        f"{sys.executable} -m cloudtrain logs -f long-1 | head -n 2",
        shell=True,
        cwd=demo,
        capture_output=True,
        text=True,
    )
    assert (head.stdout.count("\n"), head.stderr) == (2, "")
    cancelled = run_cli("cancel", "long-1", "--wait", "--json", cwd=demo)
    assert cancelled.returncode == 0, cancelled.stderr
    assert json.loads(cancelled.stdout)["state"] == "cancelled"
    assert run_cli("wait", "long-1", cwd=demo).returncode == 5


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_leave_a_run_half_submitted(demo: Path) -> None:
    script = "set -o pipefail; $0 -m cloudtrain submit good.py --run-id piped-1 2>&1 | head -n 1"
    done = subprocess.run(
        ["bash", "-c", script, sys.executable],
        cwd=demo, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (7, 1, "")
    assert run_cli("wait", "piped-1", cwd=demo).returncode == 0


@pytest.mark.slow
def test_a_full_disk_of_the_messages_stops_no_submission_and_one_of_the_result_is_no_bug(demo: Path) -> None:
    """/dev/full refuses each write, as a full disk does."""
    words = [sys.executable, "-m", "cloudtrain"]
    with open("/dev/full", "w") as full:
        sent = subprocess.run([*words, "submit", "good.py", "--run-id", "full-1"], cwd=demo, stderr=full, timeout=60)
        shown = subprocess.run(
            [*words, "status", "full-1"], cwd=demo, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (sent.returncode, shown.returncode) == (0, 8)
    assert shown.stderr.splitlines()[0] == "error: cannot write to stdout: No space left on device"


@pytest.mark.slow
def test_detach_another_store_and_ranks_in_the_lines(demo: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "st")
    done = run_cli("submit", "good.py", "--nproc-per-node", "2", "--detach", "--json", "--store", store, cwd=demo)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert f"--store {store}" in done.stderr
    logs = run_cli("logs", "-f", answer["run_id"], "--store", store, cwd=demo)
    starts = sorted(line.partition("GOT")[0] for line in logs.stdout.splitlines() if "GOT" in line)
    assert starts == ["[n0 r0] ", "[n0 r1] "]
    assert run_cli("wait", answer["run"], cwd=tmp_path).returncode == 0


def test_what_was_uploaded_is_said() -> None:
    assert format.sent("r", "p", "s3://b/runs/r", Staged(code_bytes=1)).endswith("uploaded 1 B of code")
    assert format.sent("r", "p", "s3://b/runs/r", Staged()).endswith("uploaded nothing, the store has all of it")


# ----------------------------------------------------------------------------------------------------------- a question


@pytest.mark.parametrize(
    ("words", "answer", "code", "asked"),
    [
        ([], "n\n", 5, True),
        ([], "\n", 5, True),
        ([], "y\n", 0, True),
        *(
            pytest.param(words, "n\n", 0, False, marks=pytest.mark.slow)  # they run
            for words in (["--yes"], ["--json"], ["--set", "confirm_above_usd=2000"], ["--max-runtime", "1m"])
        ),
        (["--max-runtime", "1m", "--set", "confirm_above_usd=0"], "n\n", 5, True),
    ],
)
def test_a_run_that_may_cost_much_is_asked_for_on_a_terminal(
    words: list[str], answer: str, code: int, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("print(1)\n")
    err = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setenv("NO_COLOR", "1")
    price = ["--set", "prices.localhost=1337", *([] if "--max-runtime" in words else ["--max-runtime", "1h"])]
    assert cli.main(["submit", "t.py", "--run-id", "r", *price, *words]) == code
    assert ("costs at most" in err.getvalue()) == asked
    if code == 5:
        assert err.getvalue().endswith("nothing was sent\n")
        assert not (tmp_path / ".cloudtrain").exists()
    if asked and "--max-runtime" not in words:
        assert "r costs at most 1,337 USD. Submit? [y/N] " in err.getvalue()


def test_without_a_terminal_there_is_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("print(1)\n")
    code, _, err = main_of("submit", "t.py", "--set", "prices.localhost=1337", capsys=capsys)
    assert (code, "Submit?" in err) == (0, False)


def test_list_says_why_the_state_of_a_run_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "broken").mkdir(parents=True)
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    assert cli.main(["list", "--store", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "unknown" in out
    assert re.search("^broken: .*run.json.*", err, re.MULTILINE)
    record = json.dumps({"provider": "elsewhere", "settings": {}, "job": {"source": {"path": ".", "entry_point": "t"}}})
    for number in range(5):
        (tmp_path / "runs" / f"r{number}").mkdir()
        (tmp_path / "runs" / f"r{number}" / "run.json").write_text(record)
    assert cli.main(["list", "--store", str(tmp_path)]) == 0
    assert re.findall("^(r.*?): .*'elsewhere'", capsys.readouterr().err, re.MULTILINE) == ["r4, r3, r2 and 2 more"]
