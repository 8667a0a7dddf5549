"""URLs, and what stands for them on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..errors import SpecError
from ..provider_api.protocol import Layout

__all__ = ["moved", "place_of"]


def place_of(url: str, places: Mapping[str, str], *, or_same: bool = False) -> str:
    """What stands for ``url`` by ``places``, of those that it lies in the deepest.

    `SpecError` where none does, unless then it is to be the ``or_same``.
    """
    for known in sorted(places, key=len, reverse=True):
        root = known.rstrip("/")
        if root and (url == root or url.startswith(f"{root}/")):
            return places[known].rstrip("/") + url[len(root) :]
    if or_same:
        return url
    raise SpecError(f"{url} is not on this machine; name what stands for it: --map {url}=PATH", field="map")


def moved(layout: Layout, store: str) -> Layout:
    """``layout`` in the store at the URL ``store``; what is in no store stays where it is."""
    places = {layout.store: store}
    inputs = {
        name: dataclasses.replace(item, url=place_of(item.url, places, or_same=True))
        for name, item in layout.inputs.items()
    }
    resume = layout.resume and place_of(layout.resume, places, or_same=True)
    return dataclasses.replace(layout, store=store, inputs=inputs, resume=resume)
