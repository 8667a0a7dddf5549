"""``tools/refresh_prices.py``: price lists read from the clouds' own APIs at the wire."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.vertex.identity import Identity
from worlds.vertex.wire import Answer, Call, Fault, Wire

TOOL = Path(__file__).parents[2] / "tools" / "refresh_prices.py"


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("refresh_prices", TOOL)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["refresh_prices"] = made
    spec.loader.exec_module(made)
    return made


tool = _tool()


class Clouds:
    """Three price APIs on one server. ``wire.faults`` come first; ``pages`` has each API's answers, page by page."""

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
        monkeypatch.setattr(tool, "AZURE_URL", f"{self.url}/api/retail/prices")

    def _aws(self, call: Call) -> Answer:
        assert call.headers["x-amz-target"] == "AWSPriceListService.GetProducts"
        request = call.json()
        assert request["ServiceCode"] == "AmazonSageMaker"
        (wish,) = request["Filters"]
        assert (wish["Type"], wish["Field"]) == ("TERM_MATCH", "regionCode")
        page = int(request.get("NextToken", "0"))
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


def refresh(name: str, region: str = "") -> int:
    return int(tool.main([name, region or REGIONS[name], "--out", "prices.csv"]))


def kept(name: str) -> dict[str, dict[str, str]]:
    with Path("prices.csv").open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if (row["provider"], row["region"]) == (name, REGIONS[name])]
    return {row["instance_type"]: row for row in rows}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.remote
def test_the_table_has_what_the_clouds_lists_say(clouds: Clouds, capsys: pytest.CaptureFixture[str]) -> None:
    assert refresh("sagemaker") == 0
    left = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert left == ["ml.c5.xlarge", "ml.g5.xlarge", "ml.r5.xlarge"]
    found = kept("sagemaker")
    assert {name: row["usd_per_hour"] for name, row in found.items()} == {
        "ml.m5.xlarge": "0.257",
        "ml.p5.48xlarge": "70.5",
    }
    assert {(row["own"], len(row["date"])) for row in found.values()} == {("yes", 10)}
    with tool.TABLE.open(encoding="utf-8") as stream:
        assert set(stream) < set(Path("prices.csv").read_text(encoding="utf-8").splitlines(keepends=True))
    assert refresh("azureml") == 0
    row = kept("azureml")["Standard_NC24ads_A100_v4"]
    assert (row["usd_per_hour"], row["spot_usd_per_hour"]) == ("4.2", "0.8"), "its spot tier is low priority"
    assert "Standard_D8s_v5" not in kept("azureml"), "it has two prices"
    assert refresh("vertex") == 0
    google = kept("vertex")
    machine = 1.15 * (4 * 0.035 + 15 * 0.005)  # Vertex AI's own price of an N1 machine is higher by that
    assert float(google["n1-standard-4"]["usd_per_hour"]) == pytest.approx(machine)
    assert float(google["n1-standard-4+T4:2"]["usd_per_hour"]) == pytest.approx(machine + 2 * 0.4)
    assert float(google["n1-standard-4"]["spot_usd_per_hour"]) == pytest.approx(4 * 0.01 + 15 * 0.001)
    assert not google["n1-standard-4+T4:2"]["spot_usd_per_hour"], "that GPU has no spot price"
    assert "a2-highgpu-1g" not in google, "its GPU has two"
    assert google["n1-standard-4"]["own"] == "no"


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
def test_a_list_that_cannot_be_read_leaves_the_table(
    name: str,
    trouble: str,
    code: int,
    says: str,
    clouds: Clouds,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refresh(name) == 0
    before = kept(name)
    capsys.readouterr()
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
    assert refresh(name) == code
    assert says in capsys.readouterr().err
    assert kept(name) == before


@pytest.mark.remote
def test_a_region_that_is_none(clouds: Clouds, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sagemaker", "vertex"):
        assert refresh(name, "nowhere-1") == 2
        assert "is that a region's name?" in capsys.readouterr().err
    assert refresh("azureml", "x' or 1 eq 1") == 2
    assert "not the name of a region" in capsys.readouterr().err
    assert not Path("prices.csv").exists()
