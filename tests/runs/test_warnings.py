"""The warnings of a plan, and the cases without one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.cli.format import plan_text
from cloudtrain.job.job import Job
from cloudtrain.provider_api import catalog
from cloudtrain.runs.fallback import plan_with_fallbacks
from cloudtrain.runs.submit import Plan
from cloudtrain.runs.summary import summary
from cloudtrain.runs.warnings import is_secret_name
from cloudtrain.settings.settings import Settings

ACCOUNTS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "sagemaker": (
        "s3://bucket/runs",
        {"region": "eu-west-1", "role": "arn:aws:iam::123456789012:role/Train"},
        {},
    ),
    "azureml": (
        "abfs://runs@account.dfs.core.windows.net/x",
        {"subscription_id": "0", "resource_group": "g", "workspace_name": "w", "environment": "azureml:torch:1"},
        {},
    ),
    "modelarts": (
        "obs://bucket/runs",
        {"region": "cn-north-4", "project_id": "0" * 32, "flavors": '{"A100-80GB:8": "modelarts.x.y"}'},
        {"image": "a/b:1"},
    ),
    "vertex": ("gs://bucket/runs", {"project": "my-project", "location": "europe-west4"}, {"image": "i:1"}),
    "local": ("./store", {}, {}),
}


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    return folder


def planned(code: Path, provider: str, **fields: Any) -> Plan:
    store, settings, own = ACCOUNTS[provider]
    job = Job.make(entry_point="train.py", **{**own, **fields})
    chosen = Settings.load(overrides=settings, environ={}, cwd=code, provider=provider, store=store)
    return plan_with_fallbacks(job, settings=chosen, cwd=code, preview=True)


@pytest.mark.parametrize("provider", catalog.providers())
def test_gpus_without_a_rank(code: Path, provider: str) -> None:
    wish = {"gpu": "A100-80GB:8", "instance_count": 2}
    idle = "14 of 16 GPUs have no rank (nproc_per_node = 1)"
    assert idle in planned(code, provider, nproc_per_node=1, **wish).warnings
    for fields in ({}, {"nproc_per_node": 8}, {"nproc_per_node": 1, "launcher": "python"}):
        assert not any("no rank" in text for text in planned(code, provider, **wish, **fields).warnings)
    assert planned(code, provider, **wish).document()["resources"]["gpus"] == 16


def test_a_limit_on_idle_gpus_without_a_gpu(code: Path) -> None:
    rule = "5% for 30m"
    warned = planned(code, "sagemaker", min_gpu_util=rule).warnings
    assert "min_gpu_util has no effect: ml.m5.xlarge has no GPU; ask for one with --gpu" in warned
    for plan in (planned(code, "sagemaker", gpu="T4:1", min_gpu_util=rule), planned(code, "local", min_gpu_util=rule)):
        assert not any("no effect" in text for text in plan.warnings)


@pytest.mark.parametrize("provider", [*catalog.providers(), "local"])
def test_secrets_in_env(code: Path, provider: str) -> None:
    secret = {
        "WANDB_API_KEY": "abc1234567890",
        "HFToken": "x1y2",
        "A": "ghp_abcdefghij0123456789",
        "DB": "pg://u:p@h/d",
    }
    plain = {
        "MAX_TOKENS": "512",
        "TOKENIZERS_PARALLELISM": "false",
        "TOKEN": "",
        "HF_TOKEN_PATH": "/secrets/hf",
        "B": "x",
    }
    warned = planned(code, provider, env={**secret, **plain}).warnings
    found = [text.partition(" ")[0] for text in warned if "looks like a secret" in text]
    assert found == [f"env.{name}" for name in secret]
    assert all("--secret" in text for text in warned if "looks like a secret" in text)
    assert all(value not in text for value in secret.values() for text in warned)


def test_a_password_in_the_url_of_an_input_is_sent_but_not_shown(code: Path) -> None:
    url = "http://user:pass-word@host/x.tar"
    plan = planned(code, "local", inputs={"d": url, "plain": "http://host/x.tar"})
    assert [text for text in plan.warnings if "inputs." in text] == [
        "inputs.d holds a password, key or signature, which will be recorded"
    ]
    assert "pass-word" not in plan_text(plan.document(), verbose=True)
    assert url in json.dumps(plan.document()["request"])


def test_secrets_in_arguments(code: Path) -> None:
    hyperparameters = {"api_key": "abc1234567890", "x": "hf_abcdefghij0123456789", "pad_token": "<|endoftext|>",
                       "token": "short", "max_tokens": 512,
                       "token_file": "./secrets/hf-token", "repo": "meta/llama-3-8b-instruct"}  # fmt: skip
    args = ["--wandb-key", "x", "--hub-token", "abc1234567890", "--password=abc1234567890", "ghp_abcdefghij0123456789",
            "--url", "pg://u:p@h/d", "--name=abc1234567890", "--token", "--verbose-and-long",
            "--use-auth-token"]  # fmt: skip
    warned = planned(code, "local", hyperparameters=hyperparameters, args=args).warnings
    found = {text.partition(" ")[0]: text for text in warned if "looks like a secret" in text}
    assert [*found] == ["hyperparameters.api_key", "hyperparameters.x", *(f"args[{i}]" for i in (3, 4, 5, 7))]
    assert found["hyperparameters.api_key"].endswith("use --secret API_KEY, and read that variable")
    assert found["args[3]"].endswith("use --secret HUB_TOKEN, and read that variable")
    assert not any("1234567890" in text or "0123456789" in text for text in warned)


def test_a_misspelt_placeholder_is_named_and_other_braces_are_not(code: Path) -> None:
    env = {"OUT": "{checkpoint-dir}", "CKPT": "{resume_from?}", "SHELL_OUT": "${ARTIFACT_DIR}/x"}
    hyperparameters = {"out": "{artefact_dir}/x", "name": "{epoch:02d}-{val_loss}", "resume": "{resume_from?}"}
    args = ["--t", "{input.t}", "--dir", "{checkpoint_dir?}", "ckpt={resume_from?}", "{{ run_id }}", "{rank_id}", "{}",
            "--resume", "{resume_from?}", "{inputs.t}/{run_id}", "--u={input.t}"]  # fmt: skip
    given = {"env": env, "hyperparameters": hyperparameters, "args": args, "inputs": {"t": str(code / "train.py")}}
    assert [text for text in planned(code, "local", **given).warnings if "placeholder" in text or "resume" in text] == [
        "args: {input.t} is not a placeholder; did you mean {inputs.t}?",
        "args: {checkpoint_dir?} is not a placeholder; did you mean {checkpoint_dir}?",
        "args: {resume_from?} works only as an argument of its own, not in 'ckpt={resume_from?}'; use {resume_from}",
        "env: {checkpoint-dir} is not a placeholder; did you mean {checkpoint_dir}?",
        "env: {resume_from?} works only as an argument of its own, not in '{resume_from?}'; use {resume_from}",
        "hyperparameters: {artefact_dir} is not a placeholder; did you mean {artifact_dir}?",
    ]


def test_names_of_secrets() -> None:
    assert all(map(is_secret_name, ("WANDB_API_KEY", "hfToken", "--db-password", "AWS_SECRET_ACCESS_KEY")))
    assert not any(map(is_secret_name, ("MAX_TOKENS", "KEYBOARD", "TOKENIZERS_PARALLELISM", "PATH", "SECRETARY")))


def test_a_machine_that_the_table_lacks(code: Path) -> None:
    plan = planned(code, "sagemaker", instance_type="ml.p9.48xlarge", nproc_per_node=8)
    assert any(text.startswith("ml.p9.48xlarge is not in cloudtrain's table") for text in plan.warnings)
    assert "no price of ml.p9.48xlarge is known, so the cost of this run is unknown" in plan.notes
    known = planned(code, "sagemaker", instance_type="ml.p5.48xlarge")
    assert (known.warnings, "no price" in str(known.notes)) == ((), False)


def test_memory_is_shown_and_a_choice_of_it_noted(code: Path) -> None:
    plan = planned(code, "vertex", gpu="A100:8", instance_count=2, spot=True)
    assert plan.document()["resources"]["gpu_names"] == ["A100-40GB:8"]
    assert "A100:8 is A100-40GB:8 here; for more memory write A100-80GB:8" in plan.notes
    assert not any("for more memory" in text for text in planned(code, "vertex", gpu="A100-80GB:8").notes)
    assert planned(code, "vertex", gpu="T4:1").document()["resources"]["gpu_names"] == ["T4:1"]


def test_a_plan_has_the_memory_of_each_gpu_and_the_totals(code: Path) -> None:
    total = planned(code, "sagemaker", gpu="A100-80GB", total_gpus=16)
    found = total.document()["resources"]
    assert [found[name] for name in ("gpus", "gpu_memory_gib", "total_gpu_memory_gib")] == [16, 80, 1280]
    assert total.document() == planned(code, "sagemaker", gpu="A100-80GB:8", instance_count=2).document()
    assert "GPU A100-80GB:8 (16 GPUs, 80 GiB each, 1280 GiB in all)" in summary(total.document())
    assert "GPU T4:1 (16 GiB), 1 rank" in summary(planned(code, "vertex", gpu="T4").document())
    mixed = planned(code, "azureml", gpu=["A100-80GB:8", "H200:8"]).document()
    assert (mixed["resources"]["gpu_memory_gib"], mixed["resources"]["total_gpu_memory_gib"]) == (None, None)
    assert "GPU A100-80GB:8 or H200:8, 8 ranks" in summary(mixed)
    assert "1 node, 1 rank" in summary(planned(code, "local").document())


def test_a_webhook_that_exposes_a_secret_or_is_of_no_use(code: Path) -> None:
    def warned(**fields: Any) -> str:
        return "\n".join(planned(code, "local", **fields).warnings)

    by_reference = {"webhook_headers": {"Authorization": "{secrets.T}"}, "secrets": {"T": "env:T"}}
    assert "webhook" not in warned(webhook="https://h", **by_reference)
    assert "goes to http://h without encryption" in warned(webhook="http://h", **by_reference)
    plain = warned(webhook="https://h", webhook_headers={"authorization": "Bearer x", "X-Api-Key": "y", "X-Name": "z"})
    assert plain.count("looks like a secret") == 2
    assert "the job has no webhook" in warned(webhook_headers={"A": "b"})


def test_a_saved_plan_warns_too(code: Path) -> None:
    plan = planned(code, "sagemaker", env={"API_KEY": "abc1234567890"})
    assert plan.document()["warnings"] == list(plan.warnings) != []
    assert dataclasses.replace(plan, later=()).warnings == plan.warnings


APPENDS = """import os
from pathlib import Path
open("/gcs/bucket/log.txt", "a")
Path(os.environ["AIP_MODEL_DIR"], "x").open("r+b")
with open(os.path.join(os.environ["AIP_CHECKPOINT_DIR"], "x"), mode="ab") as stream: pass
open("/gcs/bucket/new", "w"); open("/gcs/bucket/new", "w+"); open("/gcs/bucket/a")
open("/tmp/log.txt", "a"); print("/gcs/a", "a")
"""


def test_appends_to_a_mounted_object_store_are_named_with_file_and_line(code: Path) -> None:
    (code / "log.py").write_text(APPENDS)
    (code / "wrong.py").write_text("/gcs/ (")
    (code / "notes.txt").write_text(APPENDS)
    found = [text for text in planned(code, "vertex").warnings if "below /gcs/" in text]
    assert [text.split(": ")[0] for text in found] == ["log.py:3", "log.py:4", "log.py:5"]
    assert "with mode 'r+b'" in found[1]
    assert not any("/gcs/" in text for text in planned(code, "local").warnings)
