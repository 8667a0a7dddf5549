"""Map URLs to their stand-ins on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..errors import SpecError
from ..provider_api.protocol import Layout


def stand_in_for(url: str, places: Mapping[str, str], *, or_same: bool = False) -> str:
    """Return the stand-in for ``url`` by the deepest entry of ``places``. If none has it: ``url``, or `SpecError`."""
    for known in sorted(places, key=len, reverse=True):
        root = known.rstrip("/")
        if root and (url == root or url.startswith(f"{root}/")):
            return places[known].rstrip("/") + url[len(root) :]
    if or_same:
        return url
    raise SpecError(f"{url} is not on this machine", field="map", hint=f"name what stands for it: --map {url}=PATH")


def map_urls(layout: Layout, store: str) -> Layout:
    """Return ``layout`` in the store at the URL ``store``. URLs outside its own store stay as they are."""
    places = {layout.store: store}
    inputs = {
        name: dataclasses.replace(item, url=stand_in_for(item.url, places, or_same=True))
        for name, item in layout.inputs.items()
    }
    resume = layout.resume and stand_in_for(layout.resume, places, or_same=True)
    return dataclasses.replace(layout, store=store, inputs=inputs, resume=resume)
