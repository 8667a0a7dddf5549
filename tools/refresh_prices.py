"""``python tools/refresh_prices.py PROVIDER REGION``: update the package's prices before a release.

It reads the cloud's own price API with the account of this machine. Prices of known machines replace the rows of that
provider and region in ``cloudtrain/data/prices.csv``, with today's date; other rows stay. ``--out FILE`` writes
elsewhere; ``--dry-run`` prints the table.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from cloudtrain.errors import CloudtrainError, PlatformError, SpecError
from cloudtrain.provider_api import catalog
from cloudtrain.provider_api.catalog import Machine
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.providers.azureml import api as azure
from cloudtrain.providers.azureml.api import refusal
from cloudtrain.providers.sagemaker import api as aws
from cloudtrain.providers.vertex import api as google
from cloudtrain.providers.vertex.machines import priced

TABLE = Path(catalog.__file__).parents[1] / "data" / "prices.csv"
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class PriceList:
    """US dollars an hour by machine, as one API gave them for ``region`` on the day ``date`` (ISO 8601).

    ``list`` names the list, ``source`` the API. ``of_service`` is True if these are the service's own prices, instead
    of another service's for the same machines. ``unknown`` has a line for each machine left out as uncertain.
    """

    provider: str
    region: str
    date: str
    list: str
    source: str
    of_service: bool
    usd_per_hour: Mapping[str, float]
    spot_usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def certain(found: Mapping[str, set[float]]) -> dict[str, float]:
    """Return the price of each machine that has exactly one, by name."""
    return {name: next(iter(prices)) for name, prices in sorted(found.items()) if len(prices) == 1}


# SageMaker's own prices of training, from AWS's Price List Query API (``pricing``, GetProducts).
# /| A usage type such as ``USE1-Train:ml.g5.2xlarge`` marks a product of training. Bills and answers of the API have
# that form. That no other product of SageMaker ends so is not verified against a full list.
AWS_REGION = "us-east-1"
"""Region of the API, which answers in a few regions only, with the prices of all."""
AWS_SERVICE = "AmazonSageMaker"
_TRAINING = re.compile(r"(?:[A-Z0-9]+-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9-]+)")
PAGES = 1000
"""More pages than any list has."""


def sagemaker_list(account: aws.Account, region: str) -> PriceList:
    """Return US dollars an hour on demand of every instance type in ``region``. Raises only cloudtrain's errors."""
    found: dict[str, set[float]] = {}
    for product in _aws_products(account, region):
        match = _TRAINING.fullmatch(str(product.get("product", {}).get("attributes", {}).get("usagetype", "")))
        if match:
            found.setdefault(match[1], set()).update(_aws_hourly(product))
    usd = certain(found)
    unknown = sorted(name for name in found if name not in usd)
    if not usd:
        raise SpecError(
            f"the price list of {AWS_SERVICE} has no training in {region}; is that a region's name?", field="region"
        )
    return PriceList(
        provider="sagemaker",
        region=region,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        list="Amazon SageMaker training on demand",
        source="AWS Price List API, GetProducts",
        of_service=True,
        usd_per_hour=usd,
        unknown=tuple(f"{name}: no price, or several" for name in unknown),
    )


def _aws_products(account: aws.Account, region: str) -> Iterator[Mapping[str, Any]]:
    token: dict[str, str] = {}
    for _ in range(PAGES):
        answer = account.call(
            "pricing",
            "get_products",
            region=AWS_REGION,
            ServiceCode=AWS_SERVICE,
            Filters=[{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}],
            FormatVersion="aws_v1",
            **token,
        )
        for text in answer.get("PriceList", []):
            try:
                yield json.loads(text)
            except ValueError:
                raise PlatformError("GetProducts: a product is not JSON") from None
        if not answer.get("NextToken"):
            return
        token = {"NextToken": answer["NextToken"]}
    raise PlatformError(f"GetProducts: the list has more than {PAGES} pages")


def _aws_hourly(product: Mapping[str, Any]) -> Iterator[float]:
    """Yield US dollars of an hour on demand."""
    for term in (product.get("terms", {}).get("OnDemand") or {}).values():
        for dimension in (term.get("priceDimensions") or {}).values():
            usd = float(dimension.get("pricePerUnit", {}).get("USD") or 0)
            if usd > 0 and str(dimension.get("unit", "")).lower() in ("hrs", "hours", "hour"):
                yield usd


# Azure's prices of virtual machines, from the Retail Prices API, which needs no credentials.
# /| Azure ML bills a job's machines as virtual machines without a surcharge, by its page on prices. That is not
# verified against a bill, nor for serverless compute. Linux, pay as you go. Its spot tier is low priority
# (how-to-manage-quotas), which has meters of its own: a spot machine's meter is another, cheaper offer.
AZURE_URL = "https://prices.azure.com/api/retail/prices"
AZURE_WHAT = "read the retail prices"
_AZURE_OTHERS = ("windows", "cloud services", "cloudservices")
"""Words in a product's name that mean another price for the same machine."""


def azureml_list(account: azure.Account, region: str) -> PriceList:
    """Return US dollars an hour of every size in ``region`` (``westeurope``). Raises only cloudtrain's errors."""
    found: dict[str, set[float]] = {}
    low: dict[str, set[float]] = {}
    for item in _azure_items(account, region):
        words = f"{item.get('skuName', '')} {item.get('meterName', '')}".lower()
        if not _is_azure_ours(item) or "spot" in words:
            continue
        table = low if "low priority" in words else found
        table.setdefault(str(item["armSkuName"]), set()).add(float(item["retailPrice"]))
    usd, cheap = certain(found), certain(low)
    unknown = sorted(name for name in found if name not in usd)
    if not usd:
        raise SpecError(
            f"the retail prices have no virtual machines in {region!r}; is that a region's name?", field="region"
        )
    return PriceList(
        provider="azureml",
        region=region,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        list="Azure Virtual Machines on Linux, pay as you go",
        source="Azure Retail Prices API",
        of_service=True,
        usd_per_hour=usd,
        spot_usd_per_hour={name: price for name, price in cheap.items() if price <= usd.get(name, 0)},
        unknown=tuple(f"{name}: several prices" for name in unknown),
    )


def _is_azure_ours(item: Mapping[str, Any]) -> bool:
    """Return True for a price of an hour of a Linux machine without a commitment."""
    product = str(item.get("productName", "")).lower()
    return (
        item.get("type") == "Consumption"
        and item.get("currencyCode") == "USD"
        and item.get("unitOfMeasure") == "1 Hour"
        and bool(item.get("armSkuName"))
        and isinstance(item.get("retailPrice"), (int, float))
        and item["retailPrice"] > 0
        and not any(word in product for word in _AZURE_OTHERS)
    )


def _azure_items(account: azure.Account, region: str) -> Iterator[Mapping[str, Any]]:
    """Yield every price of ``region``, page by page. The address of the next page must be the same service's."""
    wish = f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}' and priceType eq 'Consumption'"
    url = f"{AZURE_URL}?currencyCode=USD&$filter={quote(wish)}"
    for _ in range(PAGES):
        answer = account.fetch(url, what=AZURE_WHAT)
        if answer.status_code >= 400:
            raise refusal(answer.status_code, "", "", what=AZURE_WHAT)
        try:
            page = json.loads(answer.body())
            yield from page["Items"]
        except (ValueError, KeyError, TypeError):
            raise PlatformError(f"{AZURE_WHAT}: the answer is not a page of prices") from None
        url = str(page.get("NextPageLink") or "")
        if not url:
            return
        if urlsplit(url)[:2] != urlsplit(AZURE_URL)[:2]:
            raise PlatformError(f"{AZURE_WHAT}: the next page is at another address, {urlsplit(url).netloc}")
    raise PlatformError(f"{AZURE_WHAT}: the list has more than {PAGES} pages")


# Compute Engine's prices of Vertex AI's machines, from Google's Cloud Billing Catalog API.
# /| Google sells cores, memory and GPUs by the hour, each as a SKU. A machine here is their sum, if each part is found
# exactly once. Vertex AI charges more than Compute Engine: `FACTORS` has the factor where a source gives one. In any
# case the list is not the service's own. The names of SKUs are those that the catalogue had for years. A machine with
# other names stays unknown, and so does one with local disks in its price (A2 Ultra, A3, A4).
GOOGLE_SERVICE = "services/6F81-5844-456A"
"""Compute Engine."""
GOOGLE_WHAT = "read the billing catalogue"
FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("n1-standard", "n1-highmem", "n1-highcpu"), "N1 Predefined"),
    **dict.fromkeys(("a2-highgpu", "a2-megagpu"), "A2"),
    "g2-standard": "G2",
}
"""Families whose price is that of cores, memory and GPUs alone, by the names in their SKUs."""
GPUS: Mapping[str, str] = {
    "NVIDIA_TESLA_T4": "Nvidia Tesla T4",
    "NVIDIA_TESLA_P4": "Nvidia Tesla P4",
    "NVIDIA_TESLA_P100": "Nvidia Tesla P100",
    "NVIDIA_TESLA_V100": "Nvidia Tesla V100",
    "NVIDIA_TESLA_A100": "Nvidia Tesla A100",
    "NVIDIA_L4": "Nvidia L4",
}
FACTORS: Mapping[str, tuple[float, float]] = {"N1 Predefined": (1.15, 1.0), "A2": (1.2, 1.2)}
"""Factors of a family's price on Vertex AI to that on Compute Engine, on demand: cores and memory, GPUs.

N1: Google's pricing page has n1-standard-4 at $0.2185 an hour of training (read 2026-10-07), Compute Engine at $0.19;
no source gives its GPUs. A2: a2-highgpu-8g at $35.26, Compute Engine at $29.39. The others have no source.
"""
NANO = 1e-9

Skus = Mapping[tuple[str, str], set[float]]
"""US dollars by (kind of use, description without its region)."""


def vertex_list(account: google.Account, region: str) -> PriceList:
    """Return US dollars an hour of the machines in ``region`` whose every part has one price. Raises only cloudtrain's
    errors."""
    found = _google_skus(account, region)
    usd: dict[str, float] = {}
    spot: dict[str, float] = {}
    unknown_families: set[str] = set()
    for machine in catalog.machines("vertex"):
        hourly = _google_sum(machine, found, spot=False)
        if hourly is None:
            unknown_families.add(machine.instance_type.rpartition("-")[0])
            continue
        usd[priced(machine)] = hourly
        cheap = _google_sum(machine, found, spot=True)
        if cheap is not None and cheap <= hourly:
            spot[priced(machine)] = cheap
    if not usd:
        raise SpecError(
            f"the billing catalogue has no machine's price in {region!r}; is that a region's name?", field="region"
        )
    return PriceList(
        provider="vertex",
        region=region,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        list="Compute Engine on demand, N1 x 1.15 and A2 x 1.2 as Vertex AI asks",
        source="Cloud Billing Catalog API",
        of_service=False,
        usd_per_hour=dict(sorted(usd.items())),
        spot_usd_per_hour=dict(sorted(spot.items())),
        unknown=(
            "what Vertex AI asks for beside Compute Engine, but for A2 and for cores and memory of N1",
            *(f"{family}: its parts are not known for certain" for family in sorted(unknown_families)),
        ),
    )


def _google_sum(machine: Machine, found: Skus, *, spot: bool) -> float | None:
    """Return the sum of the parts' prices; None if one part has no price, or several."""
    family = FAMILIES.get(machine.instance_type.rpartition("-")[0])
    if family is None or machine.vcpus is None or machine.memory_gib is None:
        return None
    use, before = ("Preemptible", "Spot Preemptible ") if spot else ("OnDemand", "")
    own, gpus = (1.0, 1.0) if spot else FACTORS.get(family, (1.0, 1.0))
    parts = [
        (machine.vcpus * own, f"{before}{family} Instance Core running in"),
        (machine.memory_gib * own, f"{before}{family} Instance Ram running in"),
    ]
    if machine.gpu:
        gpu = GPUS.get(machine.accelerator)
        attached = "GPU attached to Spot Preemptible VMs running in" if spot else "GPU running in"
        parts.append((machine.gpu_count * gpus, f"{gpu} {attached}"))
    total = 0.0
    for count, description in parts:
        prices = found.get((use, description), set())
        if len(prices) != 1:
            return None
        total += count * next(iter(prices))
    return round(total, 6)


def _google_skus(account: google.Account, region: str) -> Skus:
    found: dict[tuple[str, str], set[float]] = {}
    for sku in _google_pages(account):
        description = str(sku.get("description", ""))
        match = re.fullmatch(r"(.* running in) .+", description)
        if match is None or region not in (sku.get("serviceRegions") or ()):
            continue
        key = (str((sku.get("category") or {}).get("usageType", "")), match[1])
        found.setdefault(key, set()).update(_google_hourly(sku))
    return found


def _google_hourly(sku: Mapping[str, Any]) -> Iterator[float]:
    """Yield US dollars of an hour of one core, GiB or GPU, by the newest of its prices."""
    info = (sku.get("pricingInfo") or [{}])[-1].get("pricingExpression") or {}
    rates = info.get("tieredRates") or []
    if info.get("usageUnit") not in ("h", "GiBy.h") or len(rates) != 1:
        return
    price = rates[0].get("unitPrice") or {}
    usd = float(price.get("units") or 0) + float(price.get("nanos") or 0) * NANO
    if price.get("currencyCode", "USD") == "USD" and usd > 0:
        yield round(usd, 9)


def _google_pages(account: google.Account) -> Iterator[Mapping[str, Any]]:
    token = ""
    for _ in range(PAGES):
        parameters = {"pageSize": "5000", "currencyCode": "USD", **({"pageToken": token} if token else {})}
        url = f"{google.endpoint('cloudbilling')}/v1/{GOOGLE_SERVICE}/skus"
        answer = account.call("billing", "GET", url, what=GOOGLE_WHAT, params=parameters)
        yield from answer.get("skus") or ()
        token = str(answer.get("nextPageToken") or "")
        if not token:
            return
    raise PlatformError(f"{GOOGLE_WHAT}: the list has more than {PAGES} pages")


READERS = {"sagemaker": sagemaker_list, "azureml": azureml_list, "vertex": vertex_list}


def rows_of(made: PriceList) -> list[dict[str, str]]:
    """Return the table's rows of the machines that the package knows."""
    common = {"provider": made.provider, "region": made.region, "list": made.list, "date": made.date}
    return [
        {
            **common,
            "instance_type": name,
            "usd_per_hour": f"{usd:g}",
            "spot_usd_per_hour": f"{made.spot_usd_per_hour[name]:g}" if name in made.spot_usd_per_hour else "",
            "own": "yes" if made.of_service else "no",
            "source": made.source,
        }
        for name, usd in made.usd_per_hour.items()
        if catalog.machine(made.provider, name.partition("+")[0]) is not None
    ]


def refreshed(made: PriceList, table: str) -> str:
    """Return the text of ``table`` with the prices of ``made`` instead of older ones."""
    reader = csv.DictReader(io.StringIO(table))
    new = rows_of(made)
    key = ("provider", "instance_type", "region")
    replaced = {tuple(row[name] for name in key) for row in new}
    old = [row for row in reader if tuple(row[name] for name in key) not in replaced]
    out = io.StringIO()
    writer = csv.DictWriter(out, reader.fieldnames or (), lineterminator="\n")
    writer.writeheader()
    writer.writerows([*old, *new])
    return out.getvalue()


def main(words: Sequence[str] | None = None) -> int:
    """Write the table. If the list cannot be read, leave the table and return the error's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("provider", choices=READERS)
    parser.add_argument("region")
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(words)
    try:
        if not _REGION.fullmatch(given.region):
            raise SpecError(f"{given.region!r} is not the name of a region (eu-west-1, westeurope)", field="region")
        account: Any = find_provider(given.provider)().account  # type: ignore[attr-defined]
        made = READERS[given.provider](account, given.region)
    except CloudtrainError as exc:
        sys.stderr.write("\n".join([f"error: {exc}", *filter(None, [exc.hint])]) + "\n")
        return exc.exit_code
    for text in made.unknown:
        sys.stderr.write(f"not known: {text}\n")
    text = refreshed(made, TABLE.read_text(encoding="utf-8"))
    if given.dry_run:
        sys.stdout.write(text)
    else:
        given.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
