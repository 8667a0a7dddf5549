"""SageMaker's own prices of training, from AWS's Price List Query API (``pricing``, GetProducts).

A product of training is told by its usage type, ``USE1-Train:ml.g5.2xlarge``: that form is seen in bills and answers of
the API; that nothing else of SageMaker's ends so is not verified against a whole list.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import PlatformError, SpecError
from ...provider_api.prices import PriceList, certain
from .names import NAME

if TYPE_CHECKING:
    from .api import Account

__all__ = ["price_list"]

ENDPOINT = "us-east-1"
"""The API answers in a few regions alone, for the prices of all."""
SERVICE = "AmazonSageMaker"
_TRAINING = re.compile(r"(?:[A-Z0-9]+-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9-]+)")
PAGES = 1000
"""More than the whole list has, at 100 products a page."""


def price_list(account: Account, region: str) -> PriceList:
    """US dollars an hour on demand of every instance type in ``region``. Raises our errors alone."""
    if not region:
        raise SpecError("is not set; give --region, or set AWS_REGION", field="sagemaker.region")
    found: dict[str, set[float]] = {}
    for product in _products(account, region):
        match = _TRAINING.fullmatch(str(product.get("product", {}).get("attributes", {}).get("usagetype", "")))
        if match:
            found.setdefault(match[1], set()).update(_hourly(product))
    usd = certain(found)
    left = sorted(name for name in found if name not in usd)
    if not usd:
        raise SpecError(
            f"the price list of {SERVICE} has no training in {region}; is that a region's name?", field="region"
        )
    return PriceList(
        provider=NAME,
        region=region,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        list="Amazon SageMaker training on demand",
        source="AWS Price List API, GetProducts",
        of_service=True,
        usd_per_hour=usd,
        unknown=tuple(f"{name}: no price, or several" for name in left),
    )


def _products(account: Account, region: str) -> Iterator[Mapping[str, Any]]:
    token: dict[str, str] = {}
    for _ in range(PAGES):
        answer = account.call(
            "pricing",
            "get_products",
            region=ENDPOINT,
            ServiceCode=SERVICE,
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


def _hourly(product: Mapping[str, Any]) -> Iterator[float]:
    """US dollars of an hour on demand."""
    for term in (product.get("terms", {}).get("OnDemand") or {}).values():
        for dimension in (term.get("priceDimensions") or {}).values():
            usd = float(dimension.get("pricePerUnit", {}).get("USD") or 0)
            if usd > 0 and str(dimension.get("unit", "")).lower() in ("hrs", "hours", "hour"):
                yield usd
