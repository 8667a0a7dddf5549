"""``cloudtrain gpus``: the catalogue by name and filter, and price lists read from the clouds' own APIs at the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.vertex.identity import Identity
from worlds.vertex.wire import Answer, Call, Fault, Wire

from cloudtrain import cli
from cloudtrain.errors import SpecError
from cloudtrain.provider_api import catalog, prices

Told = tuple[int, Any, str]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """(exit code, the object on stdout, stderr) of ``gpus --json`` in an empty folder, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def ask(*words: str) -> Told:
        code = cli.main(["gpus", *words, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return ask


def names(told: Told) -> list[str]:
    code, found, err = told
    assert code == 0, err
    return [row["instance_type"] for row in found["machines"]]


# -------------------------------------------------------------------------------------------------------- the catalogue


def test_which_machines_give_so_many_of_a_gpu(asked: Callable[..., Told]) -> None:
    code, found, _ = asked("H100:8")
    assert code == 0
    assert {row["provider"] for row in found["machines"]} == set(catalog.providers())
    assert all((row["gpu"], row["gpu_count"]) == ("H100", 8) for row in found["machines"])
    assert names(asked("A100-80GB:4")) == ["Standard_NC96ads_A100_v4", "a2-ultragpu-4g"]
    assert len(names(asked("H100"))) > len(names(asked("H100:8")))
    assert names(asked("ml.p5*", "--provider", "sagemaker")) == names(asked("ML.P5*"))
    assert names(asked("ml.p5.48xlarge")) == ["ml.p5.48xlarge"]


def test_filters(asked: Callable[..., Told]) -> None:
    _, found, _ = asked("--memory", "141", "--network", "efa")
    assert found["machines"]
    assert all(row["gpu_memory_gib"] >= 141 and "EFA" in row["network"] for row in found["machines"]), found
    assert "ml.g4dn.xlarge" not in names(asked("--network", "EFA")), "it says: no EFA"
    assert names(asked("--spot-only")) == ["a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g"]
    assert "a3-highgpu-1g" not in names(asked("H100", "--no-spot-only"))
    _, found, _ = asked("--max-price", "1")
    assert found["machines"]
    assert all(row["usd_per_hour"] <= 1 for row in found["machines"])
    code, found, err = asked("H100:8", "--max-price", "1")
    assert (code, found["machines"]) == (0, [])
    assert "no machine of the catalogue is like that" in err


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        (["H10"], "pattern", "did you mean 'H100'?"),
        (["H100:3"], "pattern", "there are H100:1, H100:2, H100:4, H100:8"),
        (["ml.p5.48xlrge"], "pattern", "did you mean 'ml.p5.48xlarge'?"),
        (["H100:8", "--provider", "sagemakr"], "provider", "did you mean 'sagemaker'?"),
        (["H100:8", "--refresh-prices"], "refresh_prices", "leave pattern and filters out"),
        (["--refresh-prices", "--region", "eu-west-1"], "region", "give --provider too"),
        (["--refresh-prices", "--provider", "local"], "provider", "azureml, sagemaker, vertex"),
        (["--refresh-prices", "--provider", "azureml"], "region", "give --region"),
        (
            ["--refresh-prices", "--provider", "azureml", "--region", "x' or 1 eq 1"],
            "region",
            "not the name of a region",
        ),
    ],
)
def test_what_is_none_is_one_line(asked: Callable[..., Told], words: list[str], field: str, says: str) -> None:
    code, found, err = asked(*words)
    assert (code, found["exit_code"], found["field"]) == (2, 2, field)
    assert says in f"{found['error']}; {found['hint']}"
    assert len(err.splitlines()) == 1 + bool(found["hint"])


def test_own_prices_come_first_and_by_the_name_that_a_plan_looks_for(
    asked: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["gpus", "H100:8"]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if "ml.p5.48xlarge" in line]
    assert line.split()[-4:] == ["55.04", "16.95", "2026", "(1)"]
    assert "EC2 on demand, us-east-1" in err
    assert "another service's list" in err
    assert cli.main(["gpus"]) == 0
    priced, err = capsys.readouterr()
    assert "unknown" not in priced
    assert "machines without a known price are left out (--all)" in err
    assert cli.main(["gpus", "--all"]) == 0
    out, err = capsys.readouterr()
    assert "left out" not in err
    assert len(out.splitlines()) > len(priced.splitlines())


# ------------------------------------------------------------------------------------------------------ at the wire


class Clouds:
    """Three price APIs on one server. ``wire.faults`` come first; ``pages`` is what each answers, page by page."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wire = Wire(lambda token: self.identity.account(token))
        self.identity = Identity(self.wire, folder, project="p")
        self.pages: dict[str, list[Any]] = {"aws": [], "azure": [], "google": []}
        self.url = self.wire.listen()
        self.wire.route("POST", "/", "GetProducts", self._aws, open=True)
        self.wire.route("GET", "/api/retail/prices", "prices", self._azure, open=True)
        self.wire.route("GET", "/v1/services/6F81-5844-456A/skus", "skus", self._google)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {
            "AWS_ENDPOINT_URL_PRICING": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.identity.adc),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING": self.url,
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("cloudtrain.providers.azureml.prices.URL", f"{self.url}/api/retail/prices")

    def _aws(self, call: Call) -> Answer:
        assert call.headers["x-amz-target"] == "AWSPriceListService.GetProducts"
        asked = call.json()
        assert asked["ServiceCode"] == "AmazonSageMaker"
        (wish,) = asked["Filters"]
        assert (wish["Type"], wish["Field"]) == ("TERM_MATCH", "regionCode")
        page = int(asked.get("NextToken", "0"))
        products = [json.dumps(p) for p in self.pages["aws"][page] if _region(p) == wish["Value"]]
        more = {"NextToken": str(page + 1)} if page + 1 < len(self.pages["aws"]) else {}
        return Answer({"FormatVersion": "aws_v1", "PriceList": products, **more})

    def _azure(self, call: Call) -> Answer:
        page = int(call.query.get("$skip", "0"))
        if not page:
            assert "armRegionName eq 'westeurope'" in call.query["$filter"]
        more = f"{self.url}/api/retail/prices?$skip={page + 1}" if page + 1 < len(self.pages["azure"]) else None
        return Answer({"BillingCurrency": "USD", "Items": self.pages["azure"][page], "NextPageLink": more})

    def _google(self, call: Call) -> Answer:
        assert call.account == self.identity.email
        page = int(call.query.get("pageToken", "0"))
        more = str(page + 1) if page + 1 < len(self.pages["google"]) else ""
        return Answer({"skus": self.pages["google"][page], "nextPageToken": more})


def _region(product: Any) -> Any:
    return product["product"]["attributes"]["regionCode"]


def product(usage: str, usd: str, *, region: str = "eu-west-1", unit: str = "Hrs") -> dict[str, Any]:
    dimension = {"unit": unit, "beginRange": "0", "endRange": "Inf", "pricePerUnit": {"USD": usd}}
    return {
        "product": {"productFamily": "ML Instance", "attributes": {"usagetype": usage, "regionCode": region}},
        "serviceCode": "AmazonSageMaker",
        "terms": {"OnDemand": {"S.T": {"priceDimensions": {"S.T.D": dimension}}}},
    }


def retail(size: str, usd: float, **more: Any) -> dict[str, Any]:
    return {
        "armSkuName": size,
        "retailPrice": usd,
        "unitPrice": usd,
        "currencyCode": "USD",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "productName": "Virtual Machines NCads Series",
        "skuName": size,
        "meterName": size,
        **more,
    }


def sku(description: str, usd: float, unit: str = "h", use: str = "OnDemand", region: str = "europe-west4") -> Any:
    price = {"currencyCode": "USD", "units": str(int(usd)), "nanos": round((usd % 1) * 1e9)}
    expression = {"usageUnit": unit, "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}]}
    return {
        "description": description,
        "category": {"resourceFamily": "Compute", "usageType": use},
        "serviceRegions": [region],
        "pricingInfo": [{"pricingExpression": expression}],
    }


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clouds]:
    made = Clouds(tmp_path / "clouds", monkeypatch)
    made.pages["aws"] = [
        [
            product("EUW1-Train:ml.p5.48xlarge", "70.5000000000"),
            product("EUW1-Host:ml.p5.48xlarge", "80.0"),
            product("EUW1-Train:ml.g5.xlarge", "1.6", unit="GB-Mo"),
        ],
        [
            product("EUW1-Train:ml.m5.xlarge", "0.257"),
            product("EUW1-Train:ml.c5.xlarge", "0.2"),
            product("EUW1-Train:ml.c5.xlarge", "0.3"),
            product("USE1-Train:ml.m5.xlarge", "0.23", region="us-east-1"),
            product("EUW1-Train:ml.r5.xlarge", "0.0"),
        ],
    ]
    windows, spot = {"productName": "Virtual Machines NCads Series Windows"}, {"skuName": "NC24ads A100 v4 Spot"}
    made.pages["azure"] = [
        [
            retail("Standard_NC24ads_A100_v4", 4.2),
            retail("Standard_NC24ads_A100_v4", 6.1, **windows),
            retail("Standard_NC24ads_A100_v4", 0.7, **spot),
            retail("Standard_NC24ads_A100_v4", 0.8, skuName="NC24ads A100 v4 Low Priority"),
        ],
        [
            retail("Standard_D4s_v5", 0.2),
            retail("Standard_D4s_v5", 0.1, type="DevTestConsumption"),
            retail("Standard_D8s_v5", 0.4),
            retail("Standard_D8s_v5", 0.5),
            retail("Standard_D2s_v5", 99.0, unitOfMeasure="1/Month"),
        ],
    ]
    made.pages["google"] = [
        [
            sku("N1 Predefined Instance Core running in Netherlands", 0.035),
            sku("N1 Predefined Instance Ram running in Netherlands", 0.005, "GiBy.h"),
            sku("Nvidia Tesla T4 GPU running in Netherlands", 0.4),
            sku("Nvidia Tesla T4 GPU running in Iowa", 0.35, region="us-central1"),
        ],
        [
            sku("Spot Preemptible N1 Predefined Instance Core running in Netherlands", 0.01, use="Preemptible"),
            sku("Spot Preemptible N1 Predefined Instance Ram running in Netherlands", 0.001, "GiBy.h", "Preemptible"),
            sku("A2 Instance Core running in Netherlands", 0.03),
            sku("A2 Instance Ram running in Netherlands", 0.004, "GiBy.h"),
            sku("Nvidia Tesla A100 GPU running in Netherlands", 3.0),
            sku("Nvidia Tesla A100 GPU running in Netherlands", 3.1),
            sku("Commitment v1: N1 Cpu in Netherlands for 1 Year", 0.02, use="Commit1Yr"),
        ],
    ]
    yield made
    made.wire.close()
    assert made.wire.crashes == []


REGIONS = {"sagemaker": "eu-west-1", "azureml": "westeurope", "vertex": "europe-west4"}


def refresh(asked: Callable[..., Told], name: str) -> Told:
    return asked("--refresh-prices", "--provider", name, "--region", REGIONS[name])


def kept(provider: str) -> prices.PriceList:
    (found,) = prices.read_lists(provider)
    return found


@pytest.mark.remote
def test_the_clouds_own_lists_come_before_the_package_s(asked: Callable[..., Told], clouds: Clouds) -> None:
    for name in REGIONS:
        code, found, err = refresh(asked, name)
        assert code == 0, err
        (row,) = found["refreshed"]
        assert (row["provider"], row["region"], Path(row["file"]).is_file()) == (name, REGIONS[name], True)
    assert kept("sagemaker").usd_per_hour == {"ml.m5.xlarge": 0.257, "ml.p5.48xlarge": 70.5}
    assert [text.partition(":")[0] for text in kept("sagemaker").unknown] == [
        "ml.c5.xlarge",
        "ml.g5.xlarge",
        "ml.r5.xlarge",
    ]
    assert kept("azureml").usd_per_hour == {"Standard_D4s_v5": 0.2, "Standard_NC24ads_A100_v4": 4.2}
    assert kept("azureml").spot_usd_per_hour == {"Standard_NC24ads_A100_v4": 0.8}, "its spot tier is low priority"
    google = kept("vertex")
    machine = 1.15 * (4 * 0.035 + 15 * 0.005)  # Vertex AI's own price of an N1 machine is higher by that
    assert google.usd_per_hour["n1-standard-4"] == pytest.approx(machine)
    assert google.usd_per_hour["n1-standard-4+T4:2"] == pytest.approx(machine + 2 * 0.4)
    assert google.spot_usd_per_hour["n1-standard-4"] == pytest.approx(4 * 0.01 + 15 * 0.001)
    assert "n1-standard-4+T4:2" not in google.spot_usd_per_hour, "that GPU has no spot price"
    assert "a2-highgpu-1g" not in google.usd_per_hour, "its GPU has two"
    assert (google.of_service, kept("sagemaker").of_service) == (False, True)
    price = catalog.price("sagemaker", "ml.p5.48xlarge", region="eu-west-1")
    assert price is not None
    assert (price.usd_per_hour, price.of_service, price.own, len(price.date)) == (70.5, True, False, 10)
    elsewhere = catalog.price("sagemaker", "ml.p5.48xlarge", region="us-west-2")
    assert elsewhere is not None
    assert elsewhere.usd_per_hour == 55.04, "one region's list says nothing of another's"
    own = catalog.price("sagemaker", "ml.p5.48xlarge", {"ml.p5.48xlarge": 60}, region="eu-west-1")
    assert own is not None
    assert own.own
    _, found, _ = asked("ml.p5.48xlarge", "--region", "eu-west-1")
    assert found["machines"][0]["usd_per_hour"] == 70.5


@pytest.mark.remote
@pytest.mark.parametrize(
    ("name", "trouble", "code", "says"),
    [
        ("sagemaker", "away", 7, "AWS does not answer"),
        ("sagemaker", "nobody", 3, "no AWS credentials"),
        ("azureml", "away", 7, "Azure does not answer"),
        ("azureml", "broken", 7, "503"),
        ("azureml", "elsewhere", 9, "at another address"),
        ("vertex", "away", 7, "Google Cloud does not answer"),
        ("vertex", "nobody", 3, "no Google Cloud credentials"),
        ("vertex", "broken", 7, "Google Cloud does not answer now"),
    ],
)
def test_a_list_that_cannot_be_read_leaves_the_old_one(
    name: str,
    trouble: str,
    code: int,
    says: str,
    asked: Callable[..., Told],
    clouds: Clouds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert refresh(asked, name)[0] == 0
    before = kept(name)
    if trouble == "away":
        clouds.wire.close()
    elif trouble == "broken":
        clouds.wire.faults.append(Fault.broken({"azureml": "prices", "vertex": "skus"}[name]))
    elif trouble == "elsewhere":
        monkeypatch.setattr(clouds, "url", "http://169.254.169.254")
    else:
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"):
            monkeypatch.delenv(variable)
        monkeypatch.setenv("HOME", str(Path.cwd()))
        monkeypatch.setenv("NO_GCE_CHECK", "true")
    got, found, err = refresh(asked, name)
    assert (got, found["exit_code"]) == (code, code), err
    assert says in f"{found['error']}; {found['hint']}"
    assert len(err.splitlines()) == 1 + bool(found["hint"])
    assert kept(name) == before


@pytest.mark.remote
def test_a_region_that_is_none(asked: Callable[..., Told], clouds: Clouds) -> None:
    for name in ("sagemaker", "vertex"):
        code, found, _ = asked("--refresh-prices", "--provider", name, "--region", "nowhere-1")
        assert (code, found["field"]) == (2, "region")
        assert "is that a region's name?" in found["error"]
    assert not (Path("cache") / "cloudtrain" / "prices").exists()


@pytest.mark.remote
def test_all_of_them_at_once_as_far_as_they_go(
    asked: Callable[..., Told], clouds: Clouds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("CLOUDTRAIN_VERTEX_LOCATION", "europe-west4")
    code, found, err = asked("--refresh-prices")
    assert [row["provider"] for row in found["refreshed"]] == ["sagemaker", "vertex"]
    assert [(row["provider"], row["exit_code"]) for row in found["errors"]] == [("azureml", 2)]
    assert (code, "give --region" in err) == (2, True)


def test_a_list_is_read_again_when_it_was_replaced_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    base = {"provider": "p", "region": "r", "list": "L", "source": "S", "of_service": True}
    first = prices.PriceList(**base, date="2026-01-01", usd_per_hour={"m": 1.0})  # type: ignore[arg-type]
    file = prices.save_list(first, environ=environ)
    assert prices.read_lists("p", environ=environ) == (first,)
    second = prices.PriceList(**base, date="2026-02-01", usd_per_hour={"m": 2.0}, unknown=("x",))  # type: ignore[arg-type]
    assert prices.save_list(second, environ=environ) == file
    assert prices.read_lists("p", "r", environ=environ) == (second,)
    assert prices.read_lists("p", "other", environ=environ) == prices.read_lists("q", environ=environ) == ()
    for damage in (b"{", b"[]", b'{"format": 2}', file.read_bytes().replace(b"2.0", b"-2.0")):
        part = file.with_suffix(".new")
        part.write_bytes(damage)
        part.replace(file)
        assert prices.read_lists("p", environ=environ) == ()
    with pytest.raises(SpecError, match="not the name of a region"):
        prices.PriceList(**{**base, "region": "../x"}, date="2026-01-01", usd_per_hour={})  # type: ignore[arg-type]
