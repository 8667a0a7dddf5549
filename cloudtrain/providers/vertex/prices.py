"""Compute Engine's prices of the machines that Vertex AI has, from Google's Cloud Billing Catalog API.

Google sells cores, memory and GPUs by the hour, each a SKU of its own; a machine here is their sum, and only where each
part is found exactly once. Vertex AI asks for more than Compute Engine. `FACTORS` has by how much where a source says
so; elsewhere that is left out, and in any case the list is not the service's own. The names of SKUs are those that the
catalogue had for years; a machine whose parts are called otherwise stays unknown. Machines with local disks in their
price (A2 Ultra, A3, A4) stay unknown, too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import PlatformError, SpecError
from ...provider_api import catalog
from ...provider_api.prices import PriceList
from .errors import decoded
from .machines import priced
from .names import NAME

if TYPE_CHECKING:
    from ...provider_api.catalog import Machine
    from .api import Account

__all__ = ["price_list"]

SERVICE = "services/6F81-5844-456A"
"""Compute Engine."""
WHAT = "read the billing catalogue"
FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("n1-standard", "n1-highmem", "n1-highcpu"), "N1 Predefined"),
    **dict.fromkeys(("a2-highgpu", "a2-megagpu"), "A2"),
    "g2-standard": "G2",
}
"""Families whose price is that of cores, memory and GPUs alone, as their SKUs call them."""
GPUS: Mapping[str, str] = {
    "NVIDIA_TESLA_T4": "Nvidia Tesla T4",
    "NVIDIA_TESLA_P4": "Nvidia Tesla P4",
    "NVIDIA_TESLA_P100": "Nvidia Tesla P100",
    "NVIDIA_TESLA_V100": "Nvidia Tesla V100",
    "NVIDIA_TESLA_A100": "Nvidia Tesla A100",
    "NVIDIA_L4": "Nvidia L4",
}
FACTORS: Mapping[str, tuple[float, float]] = {"N1 Predefined": (1.15, 1.0), "A2": (1.2, 1.2)}
"""By how much a family costs more on Vertex AI than on Compute Engine, on demand: cores and memory, GPUs.

N1: Google's pricing page has n1-standard-4 at $0.2185 an hour of training (read 2026-10-07), Compute Engine at $0.19;
of its GPUs no source tells. A2: a2-highgpu-8g at $35.26, Compute Engine at $29.39. The others have no source.
"""
PAGES = 200
NANO = 1e-9

Skus = Mapping[tuple[str, str], set[float]]
"""US dollars by (kind of use, description without its place)."""


def price_list(account: Account, region: str) -> PriceList:
    """US dollars an hour of the machines in ``region`` whose every part has one price. Raises our errors alone."""
    if not region:
        raise SpecError("is not set; give --region (europe-west4), or the setting", field="vertex.location")
    found = _skus(account, region)
    usd: dict[str, float] = {}
    spot: dict[str, float] = {}
    left: set[str] = set()
    for machine in catalog.machines(NAME):
        hourly = _sum(machine, found, spot=False)
        if hourly is None:
            left.add(machine.instance_type.rpartition("-")[0])
            continue
        usd[priced(machine)] = hourly
        cheap = _sum(machine, found, spot=True)
        if cheap is not None and cheap <= hourly:
            spot[priced(machine)] = cheap
    if not usd:
        raise SpecError(
            f"the billing catalogue has no machine's price in {region!r}; is that a region's name?", field="region"
        )
    return PriceList(
        provider=NAME,
        region=region,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        list="Compute Engine on demand, N1 x 1.15 and A2 x 1.2 as Vertex AI asks",
        source="Cloud Billing Catalog API",
        of_service=False,
        usd_per_hour=dict(sorted(usd.items())),
        spot_usd_per_hour=dict(sorted(spot.items())),
        unknown=(
            "what Vertex AI asks for beside Compute Engine, but for A2 and for cores and memory of N1",
            *(f"{family}: its parts are not known for certain" for family in sorted(left)),
        ),
    )


def _sum(machine: Machine, found: Skus, *, spot: bool) -> float | None:
    """The price of its parts; None where one has none, or several."""
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


def _skus(account: Account, region: str) -> Skus:
    found: dict[tuple[str, str], set[float]] = {}
    for sku in _pages(account):
        told = str(sku.get("description", ""))
        match = re.fullmatch(r"(.* running in) .+", told)
        if match is None or region not in (sku.get("serviceRegions") or ()):
            continue
        key = (str((sku.get("category") or {}).get("usageType", "")), match[1])
        found.setdefault(key, set()).update(_hourly(sku))
    return found


def _hourly(sku: Mapping[str, Any]) -> Iterator[float]:
    """US dollars of an hour of one core, GiB or GPU, by the newest of its prices."""
    info = (sku.get("pricingInfo") or [{}])[-1].get("pricingExpression") or {}
    rates = info.get("tieredRates") or []
    if info.get("usageUnit") not in ("h", "GiBy.h") or len(rates) != 1:
        return
    price = rates[0].get("unitPrice") or {}
    usd = float(price.get("units") or 0) + float(price.get("nanos") or 0) * NANO
    if price.get("currencyCode", "USD") == "USD" and usd > 0:
        yield round(usd, 9)


def _pages(account: Account) -> Iterator[Mapping[str, Any]]:
    from .api import billing_endpoint

    token = ""
    for _ in range(PAGES):
        parameters = {"pageSize": "5000", "currencyCode": "USD", **({"pageToken": token} if token else {})}
        url = f"{billing_endpoint()}/v1/{SERVICE}/skus"
        answer = decoded(account.rest("billing", "GET", url, what=WHAT, params=parameters), what=WHAT)
        yield from answer.get("skus") or ()
        token = str(answer.get("nextPageToken") or "")
        if not token:
            return
    raise PlatformError(f"{WHAT}: the list has more than {PAGES} pages")
