"""The catalogue: every row says where it comes from, and a wish finds the smallest machine or one clear line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cloudtrain import catalog
from cloudtrain.errors import UnsupportedError
from cloudtrain.job import Gpu

TABLE = Path(catalog.__file__).parent / "data" / "instances.csv"
PROVIDERS = ("azureml", "sagemaker", "vertex")


@pytest.fixture(autouse=True)
def no_lists_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prices of the package, whatever was read from the clouds here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def found(text: str, *, cpus: int | None = None, memory_gb: int | None = None) -> str:
    return catalog.for_gpu("sagemaker", Gpu.parse(text), cpus=cpus, memory_gb=memory_gb).instance_type


def test_every_row_says_where_it_comes_from() -> None:
    assert [row for row in rows() if not row["source"].strip()] == []
    assert {row["provider"] for row in rows()} == set(PROVIDERS)
    assert {row["arch"] for row in rows()} <= {"x86_64", "arm64"}


def test_counts_and_sizes_are_sane() -> None:
    """What other catalogues got wrong: a GPU of no memory, nine of them, a machine without cores."""
    for row in rows():
        if not row["gpu_count"].isdigit():
            continue
        assert int(row["gpu_count"]) in (0, 1, 2, 4, 8, 16), row
        assert bool(row["gpu"]) == bool(int(row["gpu_count"])), row
        assert not row["gpu"] or 0 < float(row["gpu_memory_gib"]) < 400, row
        assert all(not row[name] or float(row[name]) > 0 for name in ("vcpus", "memory_gib", "disk_gb")), row
        assert row["offer"] in ("", "spot"), row
        memory = row["gpu"].rpartition("-")[2]
        if memory.endswith("GB") and memory[:-2].isdigit():
            assert abs(float(row["gpu_memory_gib"]) / int(memory[:-2]) - 1) < 0.1, row


def test_a_machine_stands_once_for_each_number_of_gpus() -> None:
    keys = [(row["provider"], row["instance_type"], row["gpu"], row["gpu_count"]) for row in rows()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_gpu_of_the_table_can_be_asked_for(provider: str) -> None:
    """By the name that it has there, and by that alone."""
    for machine in catalog.machines(provider):
        if machine.gpu:
            gpu = Gpu.parse(machine.gpus)
            assert machine.is_for(gpu), machine
            assert catalog.for_gpu(provider, gpu).gpu_count == machine.gpu_count


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("A100:8", "ml.p4d.24xlarge"),
        ("A100-40GB:8", "ml.p4d.24xlarge"),
        ("A100-80GB:8", "ml.p4de.24xlarge"),
        ("H100:1", "ml.p5.4xlarge"),
        ("H100-80GB:8", "ml.p5.48xlarge"),
        ("V100:8", "ml.p3.16xlarge"),
        ("V100-32GB:8", "ml.p3dn.24xlarge"),
        ("A10G", "ml.g5.xlarge"),
        ("T4:4", "ml.g4dn.12xlarge"),
    ],
)
def test_the_smallest_with_exactly_these_gpus(gpu: str, machine: str) -> None:
    assert found(gpu) == machine


def test_more_cores_or_memory_take_a_larger_one() -> None:
    assert found("A10G:1", cpus=9) == "ml.g5.4xlarge"
    assert found("A10G:1", memory_gb=100) == "ml.g5.8xlarge"
    families = ("ml.m5.", "ml.c5.", "ml.r5.")
    for cpus, memory_gb, name in ((8, None, "ml.c5.2xlarge"), (None, 60, "ml.r5.2xlarge"), (8, 20, "ml.m5.2xlarge")):
        assert catalog.for_cpus("sagemaker", families, cpus=cpus, memory_gb=memory_gb).instance_type == name


@pytest.mark.parametrize(
    ("gpu", "cpus", "says"),
    [
        ("A100:3", None, "there are A100-40GB:8, A100-80GB:8"),
        ("NOSUCH:1", None, "A10G:1"),
        ("A10G:1", 500, "ml.g5.16xlarge, has 64 cores"),
    ],
)
def test_none_is_one_clear_line(gpu: str, cpus: int | None, says: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        found(gpu, cpus=cpus)
    assert caught.value.field == "resources.gpu"
    assert says in str(caught.value)


def test_no_machine_without_a_gpu_is_that_large() -> None:
    for field, wish in (("cpus", {"cpus": 9999, "memory_gb": None}), ("memory_gb", {"cpus": None, "memory_gb": 99999})):
        with pytest.raises(UnsupportedError) as caught:
            catalog.for_cpus("sagemaker", ("ml.m5.",), **wish)  # type: ignore[arg-type]
        assert caught.value.field == f"resources.{field}"
    assert catalog.machine("sagemaker", "ml.none.1") is None


# --------------------------------------------------------------------------------------------------------------- prices


def test_the_package_s_price_of_a2_is_vertex_s_own() -> None:
    """$35.26 an hour, a fifth above Compute Engine's; it stays an estimate."""
    listed = catalog.price("vertex", "a2-highgpu-8g")
    assert listed is not None
    assert listed.usd_per_hour == pytest.approx(35.26, abs=0.01)
    assert (listed.of_service, "x 1.2" in listed.source) == (False, True)


def test_every_price_has_a_source_and_a_date() -> None:
    with (TABLE.parent / "prices.csv").open(newline="", encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    assert table
    for row in table:
        assert row["source"].strip(), row
        assert row["date"].startswith("20"), row
        assert float(row["usd_per_hour"]) > 0, row
        assert catalog.machine(row["provider"], row["instance_type"]) is not None, row
        assert not row["spot_usd_per_hour"] or 0 < float(row["spot_usd_per_hour"]) <= float(row["usd_per_hour"]), row
    assert len({(row["provider"], row["instance_type"]) for row in table}) == len(table)
    assert any(row["spot_usd_per_hour"] for row in table)


def test_the_account_s_own_price_comes_before_any_list() -> None:
    listed = catalog.price("sagemaker", "ml.p5.48xlarge")
    assert listed is not None
    assert (listed.own, listed.usd_per_hour) == (False, 55.04)
    assert "EC2" in listed.source
    own = catalog.price("sagemaker", "ml.p5.48xlarge", {"ml.p5.48xlarge": 60})
    assert own is not None
    assert (own.own, own.usd_per_hour, own.source) == (True, 60.0, "setting sagemaker.prices")
    assert catalog.price("sagemaker", "ml.m5.xlarge", {"ml.p5.48xlarge": 60}) is None
    assert (listed.of_service, own.of_service) == (False, True)


def test_a_list_may_be_the_service_s_own_and_decides_nothing_yet() -> None:
    """Column ``own`` of the table; a limit of money goes by ``Price.own``."""
    with (TABLE.parent / "prices.csv").open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            listed = catalog.price(row["provider"], row["instance_type"])
            assert listed is not None
            assert (listed.of_service, listed.own) == ({"yes": True, "no": False}[row["own"]], False), row
