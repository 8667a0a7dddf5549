"""Price lists that were read from the clouds' own price APIs: one file for a provider and region, with its day.

They lie in ``cloudtrain/prices`` of this user's cache folder and are read again whenever one was replaced. A file that
cannot be read counts for nothing: ``gpus --refresh-prices`` makes it again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from ..errors import SpecError, StorageError
from ..storage.local_disk import cache_home
from ..validate import is_price

__all__ = ["PriceList", "certain", "check_region", "read_lists", "save_list"]

FORMAT = 1
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class PriceList:
    """US dollars an hour by machine, as one API told them for ``region`` on the day ``date`` (ISO 8601).

    ``list`` is whose list it is, ``source`` which API; ``of_service``: it is what the very service asks for, not
    another one with the same machines. ``unknown`` says, in a line each, what was left out since it was not certain.
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

    def __post_init__(self) -> None:
        check_region(self.region)

    @property
    def told_by(self) -> str:
        """As a `catalog.Price` says its source."""
        return f"{self.list}, {self.region} ({self.source})"


def certain(found: Mapping[str, set[float]]) -> dict[str, float]:
    """The price of each machine that has exactly one, by name."""
    return {name: next(iter(prices)) for name, prices in sorted(found.items()) if len(prices) == 1}


def check_region(region: str) -> str:
    """``region`` itself. Raises `SpecError` for what no cloud calls one."""
    if not _REGION.fullmatch(region):
        raise SpecError(f"{region!r} is not the name of a region (eu-west-1, westeurope)", field="region")
    return region


def _folder(environ: Mapping[str, str]) -> Path:
    return cache_home(environ) / "prices"


def read_lists(provider: str, region: str = "", *, environ: Mapping[str, str] | None = None) -> tuple[PriceList, ...]:
    """The lists of ``provider`` for ``region`` (empty: any), the newest first."""
    folder = _folder(os.environ if environ is None else environ)
    try:
        changed = folder.stat().st_mtime_ns
    except OSError:
        return ()
    found = _read_all(str(folder), changed)
    return tuple(item for item in found if item.provider == provider and region in ("", item.region))


@lru_cache(maxsize=4)
def _read_all(folder: str, changed: int) -> tuple[PriceList, ...]:
    """Every list there, while the folder looks as it did: one is only ever replaced whole, which changes that."""
    found = [made for path in sorted(Path(folder).glob("*.json")) if (made := _read(path)) is not None]
    return tuple(sorted(found, key=lambda item: item.date, reverse=True))


def _read(path: Path) -> PriceList | None:
    try:
        data = json.loads(path.read_bytes())
        if data.pop("format") != FORMAT:
            return None
        made = PriceList(**{**data, "unknown": tuple(data["unknown"])})
        prices = [*made.usd_per_hour.values(), *made.spot_usd_per_hour.values()]
        right = all(is_price(usd) for usd in prices)
        return made if right and all(isinstance(made.__dict__[name], str) for name in ("date", "list")) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecError):
        return None


def save_list(made: PriceList, *, environ: Mapping[str, str] | None = None) -> Path:
    """Keep a list, in the place of an older one; the file. Raises `StorageError`, and then the older one is there."""
    folder = _folder(os.environ if environ is None else environ)
    path = folder / f"{made.provider}-{made.region}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"format": FORMAT, **asdict(made)}, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(part, path)
    except OSError as exc:
        raise StorageError(f"cannot write {path}: {exc.strerror or exc}") from None
    return path
