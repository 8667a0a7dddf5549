"""The public functions and the Estimator: its keywords are the Job's fields, and fit is a submit that can wait."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import cloudtrain
from cloudtrain import errors
from cloudtrain.cli.key_value import SPELLINGS
from cloudtrain.errors import NotFoundError, SpecError
from cloudtrain.estimator import Estimator, RunFailedError, log_line, ranks
from cloudtrain.job.job import FLAT_FIELDS, Input, Job
from cloudtrain.runs.log_order import Line
from cloudtrain.runs.retry import Retry
from cloudtrain.store.store import Store

SCRIPT = """
import os, sys
data = open(os.environ["CLOUDTRAIN_INPUT_TRAIN"]).read()
print("trained on", data, sys.argv[1:], flush=True)
assert data == "digits", "THE CAUSE"
"""

OWN = {"provider", "store", "profile", "fallback", "settings", "write"}


def test_its_keywords_are_the_fields_of_a_job() -> None:
    parameters = inspect.signature(Estimator).parameters
    assert set(parameters) == (set(FLAT_FIELDS) - {"min_instance_count"}) | OWN
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert {p.default for p in parameters.values()} == {None}


def test_what_is_not_given_is_the_jobs_default() -> None:
    assert Estimator(entry_point="t.py").job == Job.make(entry_point="t.py")


def test_what_is_given_reaches_the_job() -> None:
    estimator = Estimator(
        entry_point=Path("t.py"),
        source_dir=Path("src"),
        dependencies=[Path("../lib")],
        requirements=Path("all.txt"),
        instance_count=2,
        gpu="H100:8",
        hyperparameters={"lr": 0.1},
        max_runtime=timedelta(hours=12),
        spot=True,
        retries=0,
    )
    assert estimator.job == Job.make(
        entry_point="t.py", source_dir="src", dependencies=["../lib"], requirements="all.txt", instance_count=2,
        gpu=["H100:8"], hyperparameters={"lr": 0.1}, max_runtime=43200, spot=True,
    )  # fmt: skip


def test_a_misspelt_keyword_or_a_wrong_value_is_refused() -> None:
    with pytest.raises(TypeError):
        Estimator(entry_point="t.py", instance_cout=2)  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="instance_count"):
        Estimator(entry_point="t.py", instance_count=0)


def test_log_lines_name_node_and_rank_where_there_are_many() -> None:
    line = Line(attempt="0.0", node=1, rank=3, seq=1, text="hello")
    assert log_line(line, many=True) == "[n1 r3] hello"
    assert log_line(line, many=False) == "hello"
    assert log_line(Line(attempt="0.0", node=1, rank=None, seq=2, text="x"), many=True) == "[n1] x"
    assert log_line(Line(attempt="", node="algo-1", rank=None, seq=0, text="x"), many=True) == "[algo-1] x"
    assert log_line(Line(attempt="", node="", rank=None, seq=0, text="x"), many=True) == "x"


def test_ranks() -> None:
    assert ranks(Job.make(entry_point="t.py", instance_count=2, nproc_per_node=3)) == 6
    assert ranks(Job.make(entry_point="t.py", instance_count=2, gpu="H100:8", launcher="python")) == 2


def test_a_failed_run_is_an_error_with_its_result() -> None:
    result = {"run_id": "r-1", "state": "failed", "category": "oom", "exit_code": 1, "reason": "killed"}
    error = RunFailedError(result)
    assert (error.exit_code, error.result) == (1, result)
    assert str(error) == "run r-1 failed (oom): killed"


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with train.py in ``src`` and two inputs; the store is next to it."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text(SCRIPT)
    (tmp_path / "good").write_text("digits")
    (tmp_path / "bad").write_text("letters")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.costly
def test_fit_writes_the_logs_and_returns_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimator = Estimator(entry_point="train.py", source_dir="src", hyperparameters={"lr": 0.1}, provider="local")
    run = estimator.fit("good", run_id="fit-1")
    assert "trained on digits ['--lr', '0.1']" in capsys.readouterr().out.splitlines()
    assert estimator.latest_run is run
    assert Estimator.attach("fit-1").result() == Estimator.attach(run.url).result() == run.result()


@pytest.mark.slow
def test_fit_raises_for_a_run_that_failed_and_attach_finds_it(folder: Path) -> None:
    lines: list[str] = []
    estimator = Estimator(
        entry_point="train.py", source_dir="src", inputs={"train": "good"}, store=str(folder / "st"), write=lines.append
    )
    with pytest.raises(RunFailedError, match="THE CAUSE") as caught:
        estimator.fit({"train": Input(url="bad")}, run_id="fit-2")
    assert (caught.value.exit_code, caught.value.result["failure"]["rank"]) == (1, 0)
    assert any("trained on letters" in line for line in lines)
    assert estimator.latest_run is not None
    assert Estimator.attach("fit-2", store=str(folder / "st")).url == estimator.latest_run.url


@pytest.mark.slow
def test_fit_without_waiting_returns_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Estimator(entry_point="train.py", source_dir="src").fit(folder / "good", wait=False)
    assert run.wait()["state"] == "succeeded"
    assert capsys.readouterr().out == ""


def test_plan_sends_nothing(folder: Path) -> None:
    plan = Estimator(entry_point="train.py", source_dir="src", settings={"max_code_mb": 1}).plan("good")
    assert plan.run_id == "train-plan"
    assert plan.document()["inputs"]["train"]["file"] == "good"
    assert plan.document()["limits"]["max_code_bytes"] == 1 << 20
    assert not (folder / ".cloudtrain").exists()
    assert str(plan).startswith("run")
    assert {line.split()[0] for line in str(plan).splitlines()} > {"run", "script", "code", "limits", "sends"}
    assert str(plan).splitlines()[-1].split() == ["next", "cloudtrain.submit(job)"]
    assert repr(plan) == f"Plan({plan.run_url!r}, provider='local')"


def test_an_empty_run_id_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come from an unset variable of a pipeline. A new id each time would send the job each time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    for call in (Estimator(entry_point="t.py").plan, Estimator(entry_point="t.py").fit):
        with pytest.raises(SpecError, match="run_id: '' is not a run id"):
            call(run_id="")
        with pytest.raises(SpecError, match="run_id: 7 is not a run id"):  # the number of a build
            call(run_id=7)
    assert not list(tmp_path.glob(".cloudtrain/runs/*"))


# --------------------------------------------------------------------------------------------- plan, submit and attach


def test_a_job_is_planned_sent_and_found_again_by_functions(folder: Path) -> None:
    job = Job.make(entry_point="train.py", source_dir="src", inputs={"train": "good"}, max_runtime="5m")
    assert cloudtrain.plan(job, settings={"max_code_mb": 1}).document()["limits"]["max_code_bytes"] == 1 << 20
    assert not (folder / ".cloudtrain").exists()
    run = cloudtrain.submit(job, run_id="f-1")
    lines: list[str] = []
    assert run.wait(on_line=lambda line: lines.append(line.text))["state"] == "succeeded"
    assert "trained on digits []" in lines
    again = cloudtrain.attach("f-1")
    assert again.url == run.url
    assert cloudtrain.submit(job, run_id="f-1").result() == again.result(), "the same run, sent once"
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in str(again).splitlines()}
    assert (rows["run"], rows["state"], rows["next"]) == ("f-1", "succeeded", 'run.pull("results")')
    assert "1 node" in rows["job"]


def test_a_path_is_a_store_and_a_run_and_a_wrong_type_is_refused_in_one_line(folder: Path) -> None:
    job = Job.make(entry_point="train.py", source_dir="src", inputs={"train": "good"}, max_runtime="5m")
    run = cloudtrain.submit(job, run_id="f-3", store=Path("stored"))
    assert cloudtrain.attach(folder / "stored/runs/f-3").url == run.url == f"file://{folder}/stored/runs/f-3"
    assert cloudtrain.attach("f-3", store=folder / "stored").wait(timeout="2m")["state"] == "succeeded"
    assert Estimator.reconcile(folder / "stored") == []
    for timeout in (timedelta(seconds=2.5), -1, timedelta(seconds=-0.5)):  # below zero: one look
        assert run.wait(timeout=timeout)["state"] == "succeeded"
    calls: dict[str, Callable[[], Any]] = {
        "run: must be text, not int": lambda: cloudtrain.attach(4),  # type: ignore[arg-type]
        "sweep: must be text, not Run": lambda: cloudtrain.Sweep.attach(run),  # type: ignore[arg-type]
        "target: must be text, not int": lambda: Estimator.reconcile(3),  # type: ignore[arg-type]
        "timeout: 'soon' is not a duration": lambda: run.wait(timeout="soon"),
        "timeout: nan is not a whole": lambda: run.wait(timeout=float("nan")),
        "patience: None is not a whole": lambda: run.wait(patience=None),  # type: ignore[arg-type]
        "poll: 'x' is not a duration": lambda: run.logs(poll="x"),  # type: ignore[arg-type]
        "profile: must be text, not int": lambda: cloudtrain.plan(job, profile=3),  # type: ignore[arg-type]
        "inputs: must be a table": lambda: Estimator(entry_point="train.py").fit(3),  # type: ignore[arg-type]
        "not JSON: the JSON object must be": lambda: Job.from_json(3),  # type: ignore[arg-type]
        "job: must be text, not bytes": lambda: Job.from_toml(b"x = 1"),  # type: ignore[arg-type]
    }
    for text, call in calls.items():
        with pytest.raises(SpecError) as caught:
            call()
        assert str(caught.value).startswith(text)


class _Odd(os.PathLike[str]):
    """A path that is no pathlib.Path, and a number that is none of Python's own."""

    def __fspath__(self) -> str:
        return "odd"

    def __index__(self) -> int:
        return 0


class _Remote(_Odd):
    """A path of cloudpathlib, whose `os.fspath` downloads the file."""

    def __str__(self) -> str:
        return "s3://bucket/data"

    def __fspath__(self) -> str:
        raise AssertionError("a download")


@pytest.fixture
def ended(folder: Path) -> cloudtrain.Run:
    run = cloudtrain.submit(Job.make(entry_point="train.py", source_dir="src", inputs={"train": "good"}), run_id="f-4")
    run.wait()
    return run


@pytest.mark.costly
def test_an_argument_of_a_wrong_type_is_refused_in_one_line(ended: cloudtrain.Run) -> None:
    run, space = ended, {"lr": [1, 2]}
    job = Job.make(entry_point="train.py", source_dir="src")
    sweep = cloudtrain.Sweep(job, space=space, metric="loss", trials=1)
    estimator = Estimator(entry_point="train.py", source_dir="src", provider="sagemaker")
    loose: Any = {
        "run": run,
        "sweep": sweep,
        "estimator": estimator,
        "job": job,
        "Estimator": Estimator,
        "space": space,
    }
    loose |= {"Sweep": cloudtrain.Sweep, "cloudtrain": cloudtrain, "Job": Job}
    calls = {
        "run.report(3)": "path: must be text, not int",
        "run.report('a\\0b')": "path: holds a NUL",
        "run.pull(b'x')": "folder: must be text, not bytes",
        "run.pull('out', what=3)": "what[0]: must be text, not int",
        "run.pull('out', what=[None])": "what[0]: must be text, not NoneType",
        "run.pull('out', on_pull=3)": "on_pull: must be a function, not 3",
        "run.pull('out', progress='x')": "progress: must be a function, not 'x'",
        "run.logs(node='first')": "node: must be a whole number, not 'first'",
        "run.logs(rank=[0])": "rank: must be a whole number, not [0]",
        "run.logs(node=0.5)": "node: must be a whole number, not 0.5",
        "run.logs(n=10**400)": "n: must be 0 or more, at most",
        "run.shell(command=3)": "command: must be a list of texts, not int",
        "run.shell(command='ls')": "command: must be a list of texts, not str",
        "run.wait(on_line=3)": "on_line: must be a function, not 3",
        "run.wait(on_status='x')": "on_status: must be a function, not 'x'",
        "run.wait(retry=1)": "retry: must be a function, not 1",
        "run.reconcile(say=1)": "say: must be a function, not 1",
        "job.at([])": "provider: must be text, not list",
        "job.replace(retries=int)": "retries: must be a whole number, not <class 'int'>",
        "job.replace(max_runtime=10**400)": "max_runtime: must be at most 100 years",
        "Job.from_toml('', folder=3)": "folder: must be text, not int",
        "cloudtrain.plan(job, store='a\\0b')": "store: holds a NUL",
        "Estimator(entry_point='train.py', settings=3)": "settings: must be a table",
        "Estimator(entry_point='train.py', write=3).plan()": "write: must be a function, not 3",
        "estimator.rehearse(preempt=3)": "preempt[0]: must be text, not int",
        "estimator.rehearse(maps=[1], local_image='i')": "maps: must be a table",
        "estimator.rehearse(maps={'s3://b': 1}, local_image='i')": "map: must be text, not int",
        "estimator.rehearse(local_image=3)": "local_image: must be text, not int",
        "estimator.rehearse(local_store=3)": "local_store: must be text, not int",
        "Estimator(entry_point='src/train.py', provider='sagemaker').rehearse(local_image='i', secret_values='x')":
            "secret_value: must be a table",
        "Sweep(job, space=space, metric='loss', trials=1, first=3)": "first[0]: must be a table",
        "Sweep(job, space=space, metric='loss', trials=1, max_cost=10**400)": "limits.max_cost: must be a number",
        "sweep.run(on_change=3)": "on_change: must be a function, not 3",
        "sweep.step(on_change=3)": "on_change: must be a function, not 3",
        "sweep.change(3)": "limits: must be a table",
        "sweep.progress({})": "state: must be a State, not dict",
        "sweep.summary(None)": "state: must be a State, not NoneType",
        "sweep.report(3)": "path: must be text, not int",
    }  # fmt: skip
    wrong = []
    for call, message in calls.items():
        try:
            eval(call, loose)
            wrong.append(f"{call}: no error")
        except Exception as exc:  # noqa: BLE001 - any other error is a finding
            if not isinstance(exc, SpecError) or not str(exc).startswith(message):
                wrong.append(f"{call}: {exc!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.costly
def test_what_is_plainly_meant_is_taken(ended: cloudtrain.Run) -> None:
    numpy: Any = pytest.importorskip("numpy")
    texts = [line.text for line in ended.logs(rank=0)]
    assert texts
    for number in ("0", numpy.int64(0), _Odd()):
        loose: Any = number
        assert [line.text for line in ended.logs(node=loose, rank=loose)] == texts
    assert len(list(ended.logs(n=numpy.int64(1), patience=numpy.float32(2.5), poll=numpy.int32(1)))) == 1
    assert ended.wait(timeout=numpy.float32(1.5))["state"] == ended.wait(timeout=10**400)["state"] == "succeeded"
    assert ended.pull(_Odd(), what=(kind for kind in ["logs"])).folder == Path("odd").absolute()
    assert ended.report(_Odd()) == Path("odd/f-4.html")
    job = Job.make(
        entry_point="train.py",
        source_dir=_Odd(),
        max_runtime=numpy.float32(90),
        max_gpu_hours=numpy.float32(0.5),
        retries=numpy.int64(1),
        hyperparameters={"width": numpy.int64(8), "rate": numpy.float32(0.5)},
        inputs={"train": Input(url=_Remote())},  # type: ignore[arg-type]
    )
    assert (job.source.path, job.max_runtime, job.max_gpu_hours, job.retries) == ("odd", 90, 0.5, 1)
    assert job.to_dict()["hyperparameters"] == {"width": 8, "rate": 0.5}
    assert job.inputs["train"].url == "s3://bucket/data"
    assert Job.from_json(job.to_json()) == job
    assert cloudtrain.plan(Job.make(entry_point="src/train.py"), store=_Odd()).store.url.endswith("/odd")
    space = {"rate": {"low": numpy.int64(1), "high": numpy.int64(3)}, "width": [numpy.int64(8), numpy.int64(16)]}
    first = [{"rate": numpy.int64(2), "width": numpy.int64(8)}]
    job = Job.make(entry_point="src/train.py")
    sweep = cloudtrain.Sweep(job, space=space, metric="loss", trials=1, first=first)
    plain = {"rate": {"low": 1, "high": 3}, "width": [8, 16]}
    first = [{"rate": 2, "width": 8}]
    assert sweep.spec == cloudtrain.Sweep(job, space=plain, metric="loss", trials=1, first=first).spec


SECRET = {"HF_TOKEN": "hf_abcdefgh12345678"}
LOOKS = "env.HF_TOKEN looks like a secret and will be recorded; use --secret HF_TOKEN (in Python: --secret is secrets)"


@pytest.mark.parametrize("way", ["submit", "fit", "rehearse", "sweep"])
def test_a_warning_of_the_plan_is_shown_at_your_line_before_anything_is_sent(folder: Path, way: str) -> None:
    estimator = Estimator(
        entry_point="train.py", source_dir="src", env=SECRET, max_runtime="5m", instance_type="ml.m5.large"
    )
    job = estimator.job.replace(instance_type=None)
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: cloudtrain.submit(job, run_id="w"),
        "fit": lambda: Estimator(entry_point="train.py", source_dir="src", env=SECRET).fit(wait=False, run_id="w"),
        "rehearse": lambda: estimator.rehearse(local_image="none.invalid/image", wait=False, run_id="w"),
        "sweep": lambda: cloudtrain.Sweep(job, space={"x": [1]}, metric="loss", trials=1, sweep_id="w"),
    }
    estimator.provider = "sagemaker"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"looks like a secret"):
            calls[way]()
    assert not Path(".cloudtrain").exists()
    with pytest.warns(UserWarning, match="secret") as caught, suppress(cloudtrain.CloudtrainError):
        calls[way]()
    assert [str(item.message) for item in caught if "secret" in str(item.message)] == [LOOKS]
    assert {item.filename for item in caught} == {__file__}
    assert "env.HF_TOKEN looks like a secret" in cloudtrain.plan(job).warnings[0], "a plan warns of nothing by itself"


def test_an_error_in_python_names_the_keyword_of_a_flag() -> None:
    def notes(message: str, hint: str = "") -> list[str]:
        return getattr(SpecError(message, hint=hint), "__notes__", [])

    assert notes("x", "choose another --run-id") == [
        "hint: choose another --run-id", "in Python: --run-id is run_id"
    ]  # fmt: skip
    assert notes("--store: must be text") == ["in Python: --store is store"]
    assert notes("x", "add --nodes 2 --hp lr=1")[1] == "in Python: --nodes is instance_count, --hp is hyperparameters"
    for command in (
        "to look, run: aws s3 ls --profile p",
        "its files stay: cloudtrain pull r --store s",
        "gcloud x --project p",
    ):
        assert notes("x", command) == [f"hint: {command}"]
    assert notes("x") == []
    assert SPELLINGS.items() <= {name: flag for flag, name in errors._KEYWORDS.items()}.items()
    flags = {SPELLINGS.get(name, "--" + name.replace("_", "-")): name for name in FLAT_FIELDS}
    assert {flag: name for flag, name in flags.items() if notes(flag) != [f"in Python: {flag} is {name}"]} == {}


@pytest.mark.slow
def test_waiting_starts_the_attempts_that_the_job_allows(folder: Path) -> None:
    """Waiting works like `cloudtrain wait`. Since `local` itself retries, check the policy, not its effect."""
    run = cloudtrain.submit(Job.make(entry_point="train.py", source_dir="src", inputs={"train": "good"}), run_id="f-2")
    calls: list[str] = []

    def policy(run: cloudtrain.Run) -> Callable[[Mapping[str, Any]], bool]:
        calls.append(run.run_id)
        return lambda result: False

    assert run._policy is cloudtrain.attach("f-2")._policy is Retry
    run._policy = policy
    run.wait(retry=lambda result: False)
    assert calls == []
    run.wait()
    assert calls == ["f-2"]


@pytest.mark.costly
def test_what_a_notebook_shows_is_a_table_with_escaped_text(folder: Path) -> None:
    (folder / "src" / "<b>.py").write_text("print('x')\n")
    plan = cloudtrain.plan(Job.make(entry_point="<b>.py", source_dir="src", name="b"))
    assert "<tr><th>script</th><td>&lt;b&gt;.py in " in plan._repr_html_()
    assert "<b>" not in plan._repr_html_()
    run = cloudtrain.submit(Job.make(entry_point="train.py", source_dir="src", inputs={"train": "good"}), run_id="f-3")
    run.wait()
    assert "<tr><th>state</th><td>succeeded</td></tr>" in run._repr_html_()


def test_a_notebook_completes_the_public_names() -> None:
    code = "import cloudtrain; assert dir(cloudtrain) == sorted(cloudtrain.__all__), dir(cloudtrain)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)  # a process in which none is loaded yet


def test_a_run_shows_the_names_that_a_user_needs(tmp_path: Path) -> None:
    run = cloudtrain.Run(store=Store(str(tmp_path), cwd=tmp_path), run_id="none")
    assert {"status", "wait", "logs", "pull", "result", "cancel", "metrics", "checkpoint", "url"} < set(dir(run))
    assert not [name for name in dir(run) if name.startswith("_") or name in ("store", "staged")]
    assert "unknown: " in str(run), "it raises nothing"
    assert repr(run) == f"Run({run.url!r})"


FRAMES = """
import cloudtrain
from cloudtrain import Job

def train():
    {call}

train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        ("Job.make(entry_point='t.py', instance_cout=2)", "SpecError: instance_cout: ", "did you mean"),
        ("cloudtrain.plan(Job.make(entry_point='none.py'))", "none.py", ""),
        ("cloudtrain.submit(Job.make(entry_point='t.py'), provider='locl')", "locl", "local"),
        ("cloudtrain.attach('none')", "NotFoundError: run: no run 'none'", "cloudtrain list"),
        ("cloudtrain.plan('t.py')", "SpecError: job: must be a Job, not str", "Job.make(entry_point='t.py')"),
    ],
)
def test_an_error_shows_your_own_lines_alone(tmp_path: Path, call: str, message: str, hint: str) -> None:
    (tmp_path / "t.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(FRAMES.format(call=call))
    env = {**os.environ, "PYTHONPATH": str(Path(cloudtrain.__file__).parents[1]), "CLOUDTRAIN_DEBUG": ""}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert [line.split(", in ")[1] for line in frames] == ["<module>", "train"], done.stderr
    assert call in done.stderr
    assert done.stderr.count("Traceback") == 1
    tail = done.stderr.partition(call)[2]
    assert message in tail
    assert hint in tail
    whole = subprocess.run(
        command, cwd=tmp_path, env={**env, "CLOUDTRAIN_DEBUG": "1"}, capture_output=True, text=True, check=False
    )
    assert f"{os.sep}cloudtrain{os.sep}" in whole.stderr


@pytest.mark.costly
def test_a_notebook_shows_the_cell_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shell = {"__name__": "IPython.core.interactiveshell"}
    exec("def run_code(code, scope):\n    exec(code, scope)", shell)
    cell = compile("import cloudtrain\ncloudtrain.attach('none')", "<cell 1>", "exec")
    with pytest.raises(NotFoundError) as caught:
        shell["run_code"](cell, {"__name__": "__main__"})  # type: ignore[operator]
    trace = caught.value.__traceback__
    caught.value.__traceback__ = trace.tb_next if trace is not None else None  # this test's own frame
    shown = caught.value._render_traceback_()
    assert [line.strip() for line in shown if "File" in line] == ['File "<cell 1>", line 2, in <module>']
    assert shown[-2].startswith("cloudtrain.errors.NotFoundError: run: no run 'none'")
    assert shown[-1].startswith("hint: to list the runs, run: cloudtrain list")


def test_another_error_and_another_hook_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(kind))
    errors.shorten_tracebacks()
    hook = sys.excepthook
    errors.shorten_tracebacks()
    assert sys.excepthook is hook
    error = ValueError("x")
    hook(ValueError, error, None)
    assert seen == [ValueError]


def test_another_hook_gets_the_whole_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another hook may report errors to a service, which needs every frame and the cause."""
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    errors.shorten_tracebacks()
    with pytest.raises(NotFoundError) as caught:
        cloudtrain.plan(Job.make(entry_point="t.py"), provider="locl")
    error, frames = caught.value, traceback.extract_tb(caught.value.__traceback__)
    error.__cause__ = cause = KeyError("locl")
    sys.excepthook(type(error), error, error.__traceback__)
    assert seen == [error]
    assert traceback.extract_tb(error.__traceback__) == frames
    assert error.__cause__ is cause


def test_the_error_that_your_own_code_was_handling_is_shown_too(tmp_path: Path) -> None:
    """An earlier error inside cloudtrain is hidden, like its frames."""
    call = "try:\n        raise KeyError('MINE')\n    except KeyError:\n        cloudtrain.attach('none')"
    script = tmp_path / "script.py"
    script.write_text(FRAMES.format(call=call))
    env = {**os.environ, "PYTHONPATH": str(Path(cloudtrain.__file__).parents[1]), "CLOUDTRAIN_DEBUG": ""}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stderr.count("Traceback") == 2
    assert "KeyError: 'MINE'\n\nDuring handling of the above exception" in done.stderr
    assert "NotFoundError: run: no run 'none'" in done.stderr
    assert f"{os.sep}cloudtrain{os.sep}" not in done.stderr


@pytest.mark.parametrize("secret", ["https://me:SECRET@h.example/x.csv", "https://h.example/x.csv?sig=SECRET"])
def test_a_plan_s_summary_hides_the_secrets_of_a_url(folder: Path, secret: str) -> None:
    plan = cloudtrain.plan(Job.make(entry_point="train.py", source_dir="src", inputs={"train": secret}))
    assert "https://h.example/x.csv" in str(plan)
    assert "SECRET" not in str(plan) + plan._repr_html_()
