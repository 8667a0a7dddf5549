"""Text of every kind reaches the script unchanged as arguments, environment and hyperparameters, with and without
torchrun.

One run carries many values at once. About 20 s on 2 cores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jobs import Jobs

from cloudtrain.job.job import Job
from cloudtrain.runs.submit import make_plan
from cloudtrain.runs.submit import send_plan as send
from cloudtrain.settings.settings import Settings

pytestmark = pytest.mark.slow
#: Number of whole runs of 40 texts each.
TRIALS = max(2, int(os.environ.get("CLOUDTRAIN_TRIALS") or 0) // 20)

FIXED = [
    "", " ", "a b", "'", '"', "\\", "\\n", "\n", "a\nb\n", "\t", "$HOME", "${HOME}", "`id`", "$(id)", ";", "&& x", "|",
    ">", "*", "?", "[a]", "~", "#", "!", "%s", "%(x)s", "-", "--", "---", "-x", "--log", "--log x", "--log=x",
    "--nnodes=9", "--help", "-h", "--version", "-m", "-c", "--", "{", "}", "{}", "{{}}", '{"a": {"b": [1, "{x}"]}}',
    "{inputs}",
    "{resume_from?}x", "{run_id", "run_id}", "{ run_id }", "{RUN_ID}", "é", "漢字", "🎉", "\u202e", "\u2028", "\x85",
    "\x01\x7f", "\r", "\r\n", "a=b", "=b", "a=", "None", "null", "true", "1e5", "0x10", "@file", "//", "C:\\x",
    "\x1b[31m", "x" * 5000,
]  # fmt: skip
strange = st.text(
    st.one_of(
        st.sampled_from(list("{}?.'\"\\ \n\t$`-=*&|;<>!%@#~")),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    ),
    max_size=30,
)

SHOWS = """
import json, os, sys
names = json.loads(os.environ["NAMES"])
data = {"argv": sys.argv[1:], "env": {n: os.environ.get(n) for n in names},
        "hp": json.loads(os.environ["CLOUDTRAIN_HYPERPARAMETERS"])}
with open(os.path.join(os.environ["CLOUDTRAIN_ARTIFACT_DIR"], "seen-" + os.environ["RANK"]), "w") as f:
    json.dump(data, f)
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    made = Jobs(tmp_path_factory.mktemp("strange"))
    made.write("train.py", SHOWS)
    yield made
    made.close()


def run_with(jobs: Jobs, texts: list[str], *, processes: int, style: str = "flags") -> list[dict[str, Any]]:
    """Run with ``texts`` as arguments, variables and hyperparameters. Return each rank's view of them."""
    env = {f"V{i}": text for i, text in enumerate(texts)}
    job = Job.make(
        entry_point="train.py", args=texts, env={**env, "NAMES": json.dumps(sorted(env))}, hyperparameter_style=style,
        hyperparameters={f"h{i:03}": text for i, text in enumerate(texts)} | {"nested": {"list": texts}},
        nproc_per_node=processes, max_runtime="5m",
    )  # fmt: skip
    found = Settings.load(store=str(jobs.store), cwd=jobs.code, environ={})
    run = send(make_plan(job, settings=found, provider="local", cwd=jobs.code), environ={})
    result = run.wait(timeout=120)
    assert result["state"] == "succeeded", result["reason"]
    return [
        json.loads(p.read_text(encoding="utf-8"))
        for p in sorted(jobs.store.glob(f"runs/{run.run_id}/live/artifacts/node-0/seen-*"))
    ]


def check(jobs: Jobs, texts: list[str], *, processes: int) -> None:
    ranks = run_with(jobs, texts, processes=processes)
    assert len(ranks) == processes
    flags = [word for i, text in enumerate(texts) for word in (f"--h{i:03}", text)]
    for rank in ranks:
        assert rank["argv"][: len(flags)] == flags
        assert rank["argv"][len(flags)] == "--nested"
        assert json.loads(rank["argv"][len(flags) + 1]) == {"list": texts}
        assert rank["argv"][len(flags) + 2 :] == texts
        assert rank["env"] == {f"V{i}": text for i, text in enumerate(texts)}
        assert rank["hp"] == {f"h{i:03}": text for i, text in enumerate(texts)} | {"nested": {"list": texts}}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.proof)], ids=["alone", "torchrun"])
def test_the_known_troublemakers(jobs: Jobs, processes: int) -> None:
    check(jobs, FIXED, processes=processes)


def test_hydra_style(jobs: Jobs) -> None:
    (rank,) = run_with(jobs, FIXED, processes=1, style="hydra")
    assert rank["argv"][: len(FIXED)] == [f"h{i:03}={text}" for i, text in enumerate(FIXED)]


@settings(max_examples=TRIALS, phases=[Phase.generate], deadline=None)
@given(texts=st.lists(strange, min_size=40, max_size=40))
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.proof)], ids=["alone", "torchrun"])
def test_any_text(jobs: Jobs, processes: int, texts: list[str]) -> None:
    known = ("{checkpoint_dir}", "{artifact_dir}", "{resume_from}", "{run_id}", "{inputs.", "{resume_from?}")
    check(jobs, [t for t in texts if not any(k in t for k in known)], processes=processes)


def test_through_the_command_line(jobs: Jobs) -> None:
    """Check the same through flags: words after -- are the script's, and --env and --hp take the rest of their word."""
    texts = [t for t in FIXED if "{inputs" not in t]
    pairs = [word for i, text in enumerate(texts) for word in ("--env", f"V{i}={text}")]
    names = json.dumps([f"V{i}" for i in range(len(texts))])
    done = jobs.submit("train.py", *pairs, "--env", f"NAMES={names}", "--hp", "quote=it's {x}", "--", *texts)
    assert done.code == 0, done.err
    folder: Path = jobs.store / "runs" / done.json["run_id"] / "live/artifacts/node-0"
    rank = json.loads((folder / "seen-0").read_text(encoding="utf-8"))
    assert rank["argv"] == ["--quote", "it's {x}", *texts]
    assert rank["env"] == {f"V{i}": text for i, text in enumerate(texts)}


def test_the_placeholder_of_the_resume_folder(jobs: Jobs) -> None:
    jobs.write(
        "resumes.py",
        """
        import os, pathlib, sys, time
        if sys.argv[1:] == []:
            pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "s").mkdir()
            pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "s", "x").write_text("1")
        print("ARGV", sys.argv[1:], flush=True)
        """,
    )
    first = jobs.submit("resumes.py", "--", "--resume", "{resume_from?}")
    assert "ARGV []" in first.err
    second = jobs.submit("resumes.py", "--resume-from", first.json["run_id"], "--", "--resume", "{resume_from?}")
    assert "ARGV ['--resume', '/" in second.err
    assert "/checkpoints/s']" in second.err
