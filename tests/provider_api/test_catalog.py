"""The catalogue: every row names its source. A request finds the smallest machine or one clear error."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import pytest
from rows import for_each

from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.job.job import Gpu
from cloudtrain.provider_api import catalog

TABLE = Path(catalog.__file__).parents[1] / "data" / "instances.csv"
PROVIDERS = ("azureml", "modelarts", "sagemaker", "vertex")


def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def found(text: str, *, cpus: int | None = None, memory_gb: int | None = None, provider: str = "sagemaker") -> str:
    return catalog.for_gpu(provider, Gpu.parse(text), cpus=cpus, memory_gb=memory_gb).instance_type


def test_every_row_says_where_it_comes_from() -> None:
    assert [row for row in rows() if not row["source"].strip()] == []
    assert {row["provider"] for row in rows()} == set(PROVIDERS)
    assert {row["arch"] for row in rows()} <= {"x86_64", "arm64"}


def test_counts_and_sizes_are_sane() -> None:
    """Check for errors of other catalogues: a GPU without memory, nine GPUs, a machine without cores."""
    for row in rows():
        if not row["gpu_count"].isdigit():
            continue
        assert int(row["gpu_count"]) in (0, 1, 2, 4, 8, 16), row
        assert bool(row["gpu"]) == bool(int(row["gpu_count"])), row
        assert not row["gpu"] or 0 < float(row["gpu_memory_gib"]) < 400, row
        assert all(not row[name] or float(row[name]) > 0 for name in ("vcpus", "memory_gib", "disk_gb")), row
        assert row["offer"] in ("", "spot", "retired 2025-09-30"), row
        memory = row["gpu"].rpartition("-")[2]
        if memory.endswith("GB") and memory[:-2].isdigit():
            assert abs(float(row["gpu_memory_gib"]) / int(memory[:-2]) - 1) < 0.1, row


def test_a_machine_stands_once_for_each_number_of_gpus() -> None:
    keys = [(row["provider"], row["instance_type"], row["gpu"], row["gpu_count"]) for row in rows()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_gpu_of_the_table_can_be_asked_for(provider: str) -> None:
    """Check that a GPU is requested by its name there, and by no other."""
    for machine in catalog.machines(provider):
        if machine.gpu and not machine.retired:
            gpu = Gpu.parse(machine.gpus)
            assert machine.is_for(gpu), machine
            assert catalog.for_gpu(provider, gpu).gpu_count == machine.gpu_count


@for_each(
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
        ("A100:3", None, "A100-40GB:8, A100-80GB:8"),
        ("NOSUCH:1", None, "A10G"),
        ("A10G:1", 500, "ml.g5.16xlarge, has 64 cores"),
    ],
)
def test_none_is_one_clear_line(gpu: str, cpus: int | None, says: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        found(gpu, cpus=cpus)
    assert caught.value.field == "resources.gpu"
    assert says in f"{caught.value}; {caught.value.hint}"


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("V100-16GB:1", "Standard_NC6s_v3"), ("V100:4", "Standard_NC24s_v3"), ("V100-32GB:8", "Standard_ND40rs_v2")],
)
def test_a_retired_machine_is_named_in_the_refusal_and_never_chosen(gpu: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}, which had {gpu}, was retired on 2025-09-30"):
        found(gpu, provider="azureml")
    with pytest.raises(UnsupportedError, match="no known machine has V100-16GB:3") as caught:
        found("V100-16GB:3", provider="azureml")
    assert "V100-16GB:1" not in str(caught.value)


def test_no_machine_without_a_gpu_is_that_large() -> None:
    for field, wish in (("cpus", {"cpus": 9999, "memory_gb": None}), ("memory_gb", {"cpus": None, "memory_gb": 99999})):
        with pytest.raises(UnsupportedError) as caught:
            catalog.for_cpus("sagemaker", ("ml.m5.",), **wish)  # type: ignore[arg-type]
        assert caught.value.field == f"resources.{field}"
    assert catalog.machine("sagemaker", "ml.none.1") is None


# --------------------------------------------------------------------------------------------------------------- prices


def test_the_package_s_price_of_a2_is_vertex_s_own() -> None:
    """Vertex AI's price is $35.26 an hour, a fifth above Compute Engine's. It stays an estimate."""
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
        assert catalog.machine(row["provider"], row["instance_type"].partition("+")[0]) is not None, row
        assert not row["spot_usd_per_hour"] or 0 < float(row["spot_usd_per_hour"]) <= float(row["usd_per_hour"]), row
    assert len({(row["provider"], row["instance_type"], row["region"]) for row in table}) == len(table)
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


def test_the_price_is_that_of_the_region_if_the_table_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = (catalog.Price(usd_per_hour=usd, source="a list") for usd in (1.0, 2.0))
    monkeypatch.setattr(catalog, "_prices", lambda: {("p", "m"): {"here": here, "there": there}})
    assert [catalog.price("p", "m", region=name) for name in ("", "here", "there", "else")] == [here, here, there, here]


def test_a_list_may_be_the_service_s_own_and_decides_nothing_yet() -> None:
    """The table's column ``own`` marks the service's own price. A limit of money uses ``Price.own``."""
    with (TABLE.parent / "prices.csv").open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            listed = catalog.price(row["provider"], row["instance_type"], region=row["region"])
            assert listed is not None
            assert (listed.of_service, listed.own) == ({"yes": True, "no": False}[row["own"]], False), row


def _name_of_a_machine(provider: str, name: str) -> None:
    module = importlib.import_module(
        f"cloudtrain.providers.{provider}.{'machines' if provider == 'vertex' else 'request'}"
    )
    prefix = {"sagemaker": "ml.", "azureml": "Standard_"}.get(provider, "")
    catalog.check_name(provider, name, module.FORM, prefix=prefix)


@pytest.mark.parametrize("provider", catalog.providers())
def test_every_known_machine_is_well_formed(provider: str) -> None:
    for machine in catalog.machines(provider):
        _name_of_a_machine(provider, machine.instance_type)


@for_each(
    ("provider", "name"),
    [
        ("sagemaker", "ml.p9e.96xlarge"), ("sagemaker", "ml.p6e-gb300.36xlarge"), ("sagemaker", "ml.dl1.24xlarge"),
        ("azureml", "Standard_ND128isr_NDR_GB200_v6"), ("azureml", "standard_nc6s_v9"),
        ("azureml", "Standard_M832ids_16_v3"), ("azureml", "Standard_D11_v2_Promo"), ("azureml", "Standard_E4-2ds_v4"),
        ("vertex", "c4-standard-8-lssd"), ("vertex", "z3-highmem-14-standardlssd"), ("vertex", "a5-hypergpu-8g"),
    ],
)  # fmt: skip
def test_a_new_machine_passes(provider: str, name: str) -> None:
    _name_of_a_machine(provider, name)


@for_each(
    ("provider", "name", "hint"),
    [
        ("sagemaker", "p4d.24xlarge", "ml.p4d.24xlarge"),
        ("sagemaker", "ml.g5.xlrage", "ml.g5.xlarge"),
        ("sagemaker", "g5.xlrage", "ml.g5.xlarge"),
        ("sagemaker", "ml.p5-48xlarge", "ml.p5.48xlarge"),
        ("sagemaker", "H100", "cloudtrain gpus --provider sagemaker"),
        ("azureml", "NC6s_v3", "Standard_NC6s_v3"),
        ("azureml", "Standard_NC6_v33", "Standard_NC6s_v3"),
        ("azureml", "Standrad_NC6s_v3", "Standard_NC6s_v3"),
        ("vertex", "n1-standrd-4", "n1-standard-4"),
        ("vertex", "a2-hihgpu-8g", "a2-highgpu-8g"),
    ],
)
def test_a_misspelt_machine_names_the_one_that_it_means(provider: str, name: str, hint: str) -> None:
    with pytest.raises(UnsupportedError, match="not the name of a machine") as caught:
        _name_of_a_machine(provider, name)
    assert caught.value.field == "resources.instance_type"
    assert hint in caught.value.hint


def test_a_region_with_a_misspelt_word_is_refused_and_a_new_one_passes() -> None:
    known = ("eu-west-1", "us-gov-east-1", "europe-west4", "me-central-1")
    slips = {"eu-wset-1": "eu-west-1", "europe-wset4": "europe-west4", "eurpoe-west9": "europe-west9"}
    for region, meant in slips.items():
        with pytest.raises(SpecError, match=region) as caught:
            catalog.check_region("x.region", region, known)
        assert (caught.value.field, caught.value.hint) == ("x.region", f"did you mean {meant!r}?")
    for region in ("", "eu-west-9", "sa-west-1", "xx-northeast-1", "africa-south1", "eusc-de-east-1"):
        catalog.check_region("x.region", region, known)
