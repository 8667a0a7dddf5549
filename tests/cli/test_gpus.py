"""``cloudtrain gpus``: the catalogue by name and filter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import cli
from cloudtrain.provider_api import catalog

Answer = tuple[int, Any, str]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Return a function that gives (exit code, stdout's object, stderr) of ``gpus --json`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def ask(*words: str) -> Answer:
        code = cli.main(["gpus", *words, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return ask


def names(answer: Answer) -> list[str]:
    code, found, err = answer
    assert code == 0, err
    return [row["instance_type"] for row in found["machines"]]


# -------------------------------------------------------------------------------------------------------- the catalogue


def test_which_machines_give_so_many_of_a_gpu(asked: Callable[..., Answer]) -> None:
    code, found, _ = asked("H100:8")
    assert code == 0
    assert {row["provider"] for row in found["machines"]} == set(catalog.providers()) - {"modelarts"}, "it has V100"
    assert all((row["gpu"], row["gpu_count"]) == ("H100", 8) for row in found["machines"])
    assert names(asked("A100-80GB:4")) == ["Standard_NC96ads_A100_v4", "a2-ultragpu-4g"]
    assert len(names(asked("H100"))) > len(names(asked("H100:8")))
    assert names(asked("ml.p5*", "--provider", "sagemaker")) == names(asked("ML.P5*"))
    assert names(asked("ml.p5.48xlarge")) == ["ml.p5.48xlarge"]


def test_filters(asked: Callable[..., Answer]) -> None:
    _, found, _ = asked("--memory", "141", "--network", "efa")
    assert found["machines"]
    assert all(row["gpu_memory_gib"] >= 141 and "EFA" in row["network"] for row in found["machines"]), found
    assert "ml.g4dn.xlarge" not in names(asked("--network", "EFA")), "listed with EFA"
    assert names(asked("--spot-only")) == ["a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g"]
    assert "a3-highgpu-1g" not in names(asked("H100", "--no-spot-only"))
    _, found, _ = asked("--max-price", "1")
    assert found["machines"]
    assert all(row["usd_per_hour"] <= 1 for row in found["machines"])
    code, found, err = asked("H100:8", "--max-price", "1")
    assert (code, found["machines"]) == (0, [])
    assert "no machine of the catalogue fits" in err
    assert "no machine of vertex fits" in asked("--provider", "vertex", "--max-price", "0.01")[2]


def test_a_profile_lists_the_machines_of_its_provider(asked: Callable[..., Answer], tmp_path: Path) -> None:
    Path("cloudtrain.toml").write_text('[profiles.there]\nprovider = "vertex"\n[profiles.any]\nstore = "s3://x/y"\n')
    assert {row["provider"] for row in asked("--profile", "there")[1]["machines"]} == {"vertex"}
    assert asked("--profile", "any") == asked()


@pytest.mark.parametrize(("key", "parts"), [("price", False), ("gpu-price", True)])
def test_the_cheapest_comes_first_and_an_unknown_price_last(
    asked: Callable[..., Answer], key: str, parts: bool
) -> None:
    _, found, _ = asked("H100", "--sort", key)
    rows = found["machines"]
    prices = [row["usd_per_hour"] / (row["gpu_count"] if parts else 1) for row in rows if row["usd_per_hour"]]
    assert prices == sorted(prices) != sorted(prices, reverse=True)
    assert [row["usd_per_hour"] is None for row in rows] == [False] * len(prices) + [True] * (len(rows) - len(prices))
    assert {row["instance_type"] for row in rows} == set(names(asked("H100")))


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        (["H10"], "pattern", "did you mean 'H100'?"),
        (["H100:3"], "pattern", "a machine has H100:1, H100:2, H100:4, H100:8"),
        (["ml.p5.48xlrge"], "pattern", "did you mean 'ml.p5.48xlarge'?"),
        (["H100:8", "--provider", "sagemakr"], "provider", "did you mean 'sagemaker'?"),
    ],
)
def test_what_is_none_is_one_line(asked: Callable[..., Answer], words: list[str], field: str, says: str) -> None:
    code, found, err = asked(*words)
    assert (code, found["exit_code"], found["field"]) == (2, 2, field)
    assert says in f"{found['error']}; {found['hint']}"
    assert len(err.splitlines()) == 1 + bool(found["hint"])


def test_own_prices_come_first_and_by_the_name_that_a_plan_looks_for(
    asked: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found, _ = asked("ml.p5.48xlarge", "--provider", "sagemaker", "--set", "prices.ml.p5.48xlarge=98")
    (row,) = found["machines"]
    assert (row["usd_per_hour"], row["price"]["own"]) == (98.0, True)
    monkeypatch.setenv("CLOUDTRAIN_VERTEX_PRICES", "n1-standard-8+T4:2=1.25, n1-standard-8=0.5")
    _, found, _ = asked("n1-standard-8")
    assert {row["gpu_count"]: row["usd_per_hour"] for row in found["machines"] if row["gpu"] == "T4"}[2] == 1.25
    monkeypatch.setenv("CLOUDTRAIN_VERTEX_PRICES", "1.25")
    code, found, _ = asked("T4")
    assert (code, found["field"]) == (2, "CLOUDTRAIN_VERTEX_PRICES")


def test_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["gpus", "H100:8"]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if "ml.p5.48xlarge" in line]
    assert line.split()[-4:] == ["55.04", "16.95", "2026", "(1)"]
    assert "EC2 on demand, us-east-1" in err
    assert "the price list of another service" in err
    assert cli.main(["gpus"]) == 0
    priced, err = capsys.readouterr()
    assert "unknown" not in priced
    assert "machines without a known price are not listed (--all lists them)" in err
    assert cli.main(["gpus", "--all"]) == 0
    out, err = capsys.readouterr()
    assert "are not listed" not in err
    assert len(out.splitlines()) > len(priced.splitlines())
