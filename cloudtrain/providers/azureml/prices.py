"""Azure's prices of virtual machines, from the Retail Prices API, which asks for no credentials.

Azure ML bills a job's machines as virtual machines, with no price of its own on top, by its page on prices; that is not
verified against a bill, and neither is it for serverless compute. Linux, pay as you go. Its spot tier is low priority
(how-to-manage-quotas), which has meters of its own: a spot machine's meter is another, cheaper offer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ...errors import PlatformError, SpecError
from ...provider_api.prices import PriceList, certain
from .errors import refusal
from .names import NAME

if TYPE_CHECKING:
    from .api import Account

__all__ = ["price_list"]

URL = "https://prices.azure.com/api/retail/prices"
WHAT = "read the retail prices"
_OTHERS = ("windows", "cloud services", "cloudservices")
"""In the name of a product: the same machine at another price."""
PAGES = 1000


def price_list(account: Account, region: str) -> PriceList:
    """US dollars an hour of every size in ``region`` (``westeurope``). Raises our errors alone."""
    if not region:
        raise SpecError("Azure has a price for each region: give --region (westeurope)", field="region")
    found: dict[str, set[float]] = {}
    low: dict[str, set[float]] = {}
    for item in _items(account, region):
        words = f"{item.get('skuName', '')} {item.get('meterName', '')}".lower()
        if not _is_ours(item) or "spot" in words:
            continue
        table = low if "low priority" in words else found
        table.setdefault(str(item["armSkuName"]), set()).add(float(item["retailPrice"]))
    usd, cheap = certain(found), certain(low)
    left = sorted(name for name in found if name not in usd)
    if not usd:
        raise SpecError(
            f"the retail prices have no virtual machines in {region!r}; is that a region's name?", field="region"
        )
    return PriceList(
        provider=NAME,
        region=region,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        list="Azure Virtual Machines on Linux, pay as you go",
        source="Azure Retail Prices API",
        of_service=True,
        usd_per_hour=usd,
        spot_usd_per_hour={name: price for name, price in cheap.items() if price <= usd.get(name, 0)},
        unknown=tuple(f"{name}: several prices" for name in left),
    )


def _is_ours(item: Mapping[str, Any]) -> bool:
    """A price for an hour of a Linux machine, of the kind that nobody has to commit to."""
    product = str(item.get("productName", "")).lower()
    return (
        item.get("type") == "Consumption"
        and item.get("currencyCode") == "USD"
        and item.get("unitOfMeasure") == "1 Hour"
        and bool(item.get("armSkuName"))
        and isinstance(item.get("retailPrice"), (int, float))
        and item["retailPrice"] > 0
        and not any(word in product for word in _OTHERS)
    )


def _items(account: Account, region: str) -> Iterator[Mapping[str, Any]]:
    """Every price there is of ``region``, page by page; the address of the next one must be the same service's."""
    wish = f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}' and priceType eq 'Consumption'"
    url = f"{URL}?currencyCode=USD&$filter={quote(wish)}"
    for _ in range(PAGES):
        answer = account.fetch(url, what=WHAT)
        if answer.status_code >= 400:
            raise refusal(answer.status_code, "", "", what=WHAT)
        try:
            told = json.loads(answer.body())
            yield from told["Items"]
        except (ValueError, KeyError, TypeError):
            raise PlatformError(f"{WHAT}: the answer is not what it promises to be") from None
        url = str(told.get("NextPageLink") or "")
        if not url:
            return
        if urlsplit(url)[:2] != urlsplit(URL)[:2]:
            raise PlatformError(f"{WHAT}: the next page is at another address, {urlsplit(url).netloc}")
    raise PlatformError(f"{WHAT}: the list has more than {PAGES} pages")
