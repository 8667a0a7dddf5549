"""Names of checkpoints and their files: families, steps, and which ones a training can resume from."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from rows import for_each

from cloudtrain.runtime.checkpoint_names import family, step_of, training_states, unversioned
from cloudtrain.validate import unix_seconds, without_secrets


@for_each(
    ("name", "step"),
    [
        ("step-30", 30),
        ("step_30.pt", 30),
        ("checkpoint-500", 500),
        ("ckpt000123.pt", 123),
        ("iter_0000100", 100),
        ("global_step200", 200),
        ("epoch=3-step=1500.ckpt", 1500),
        ("epoch=3.ckpt", None),
        ("model_epoch_12.pt", None),
        ("epoch=3-step=1500-v1.ckpt", 1500),
        ("step=1500-epoch=3.ckpt", 1500),
        ("step-30-loss0.25.pt", 30),
        ("Iteration-7", 7),
        ("model-12", 12),
        ("last.ckpt", None),
        ("last-v1.ckpt", None),
        ("runs--2025-11-30_1040", None),
        ("20251130-104022", None),
        ("2025-11-30T10:40:22", None),
        ("2025-11-30_1040-v2", None),
        ("2025-11-30_10-40-step-5", 5),
        ("2025-11-30_10-40-22-12", 12),
        ("20251130", 20251130),
        ("model-2025-06-01-5000.pt", 5000),
        ("model-2025-06-01_1000.pt", 1000),
        ("model_20250601_100000.pt", 100000),
        ("tokens-20971520-1200", 1200),
        ("model-2048-1024.pt", 1024),
        ("ckpt_20240101_120000", 20240101),
        ("best", None),
        ("", None),
    ],
)
def test_the_step_that_a_name_tells(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_a_family_is_a_name_without_its_numbers() -> None:
    assert family("checkpoint-500") == family("checkpoint-1000") != family("last.ckpt")
    assert family("__0_0.distcp") == family("__13_2.distcp")


HF = ["model.safetensors", "optimizer.pt", "rng_state_0.pth", "trainer_state.json"]


@for_each(
    ("name", "plain"),
    [("last.ckpt", "last.ckpt"), ("last-v1.ckpt", "last.ckpt"), ("last-v12.ckpt", "last.ckpt"), ("last_V2", "last"),
     ("last.v3.pt", "last.pt"), ("epoch=2-v1.ckpt", "epoch=2.ckpt"),
     ("conv2.pt", "conv2.pt"), ("last-v.pt", "last-v.pt")],
)  # fmt: skip
def test_a_version_is_no_part_of_the_name(name: str, plain: str) -> None:
    assert unversioned(name) == plain


@pytest.mark.parametrize(
    ("entries", "chosen"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({"checkpoint-500": HF, "checkpoint-1000": HF}, "checkpoint-500 checkpoint-1000", id="folders"),
        pytest.param(
            {"checkpoint-500": HF, "model.safetensors": [""], "config.json": [""], "runs": ["a/events.out.tfevents.1"]},
            "checkpoint-500",
            id="a trainer's final model beside its checkpoints",
        ),
        pytest.param(
            {"epoch=1.ckpt": ["weights.pt"], "last.ckpt": ["weights.pt"], "export": ["model.onnx"]},
            "epoch=1.ckpt last.ckpt",
            id="a folder without a number, of the same make",
        ),
        pytest.param(
            {"checkpoint-500": HF, "final": ["model.safetensors", "config.json"], "last": [*HF, "more.pt"]},
            "checkpoint-500 last",
            id="a final model in a folder, without its optimizer",
        ),
        pytest.param(
            {"checkpoint-500": HF, "checkpoint-1000": ["rng_state_1.pth"], "final": ["rng_state_0.pth", "config.json"]},
            "checkpoint-500",
            id="the random numbers of node 1 alone, after node 0 has deleted its part",
        ),
        pytest.param({"checkpoint_7": ["random_states_1.pkl", "notes.txt"]}, "", id="random numbers are all there is"),
        pytest.param(
            {"fold1": ["random_state_42/model.pt"], "fold2": ["random_state_42/model.pt"]},
            "fold1 fold2",
            id="states in folders named after their seed",
        ),
        pytest.param(
            {"step-8": ["model.json", "random_state.pkl"], "step-9": ["a.json", "rng_state_0.pth", "rng_state_1.pth"]},
            "step-8 step-9",
            id="a state with the random numbers of rank 0 is no rest: its model may be a text",
        ),
        pytest.param(
            {"model": ["model.pt"], "rng": ["rng_state_0.pth"], "random_state.pkl": [""]},
            "model rng random_state.pkl",
            id="random numbers in entries of their own",
        ),
        pytest.param(
            {"global_step20": ["mp_rank_00.pt"], "latest": [""], "zero_to_fp32.py": [""]},
            "global_step20",
            id="a script beside folders",
        ),
        pytest.param(
            {
                "epoch=1-step=10.ckpt": [""],
                "last.ckpt": [""],
                "last-v1.ckpt": [""],
                "hparams.yaml": [""],
                "x.bin": [""],
            },
            "epoch=1-step=10.ckpt last.ckpt last-v1.ckpt",
            id="files of one suffix",
        ),
        pytest.param({"last.ckpt": [""], "best.pt": [""], "README.md": [""]}, "last.ckpt best.pt", id="no number"),
        pytest.param({"state": ["model.pt"], "log": ["out.log"]}, "state", id="a folder of logs"),
        pytest.param({"state.json": [""], "state-2.json": [""]}, "state-2.json state.json", id="text is all there is"),
        pytest.param({"events.out.tfevents.17.host": [""], "model.pt": [""]}, "model.pt", id="tensorboard's files"),
        pytest.param({"step-1": ["notes.txt"], "step-2": ["model.pt"]}, "step-2", id="a numbered folder of text"),
    ],
)
def test_what_a_training_can_go_on_from(entries: dict[str, list[str]], chosen: str) -> None:
    assert training_states({f"key of {name}": (name, paths) for name, paths in entries.items()}) == {
        f"key of {name}" for name in chosen.split()
    }


@for_each(
    ("moment", "seconds"),
    [
        (1000.5, 1000.5),
        ("1970-01-01T00:00:10Z", 10.0),
        ("1970-01-01T00:00:10.123456789Z", 10.123456),
        ("1970-01-01 01:00:10.5+01:00", 10.5),
        (datetime(1970, 1, 1, 0, 0, 10), 10.0),
        (datetime(1970, 1, 1, 1, 0, 10, tzinfo=timezone(timedelta(hours=1))), 10.0),
    ],
)
def test_moments_of_every_back_end(moment: datetime | str | float, seconds: float) -> None:
    assert unix_seconds(moment) == pytest.approx(seconds, abs=1e-6)


def test_a_url_is_shown_without_what_may_be_a_secret() -> None:
    for url in ("s3://KEY:ab/cd@bucket/x", "https://me:pw@host/x?sig=1", "s3://bucket/x"):
        assert without_secrets(url) in ("s3://bucket/x", "https://host/x")
