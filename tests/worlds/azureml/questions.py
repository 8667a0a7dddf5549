"""Answers of the resource manager for ``doctor``: permissions, machine sizes, usage of quotas."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .wire import Answer, Call

if TYPE_CHECKING:
    from .plane import Plane

__all__ = ["SIZES", "Questions"]

KIND = "Microsoft.MachineLearningServices"
SIZES = {
    "Standard_DS3_v2": ("standardDSv2Family", "Standard DSv2 Family Cluster Dedicated vCPUs", 4),
    "Standard_NC4as_T4_v3": ("standardNCASv3_T4Family", "Standard NCASv3_T4 Family Cluster Dedicated vCPUs", 4),
}
"""Family of each size, the family's name in the usages, and its cores, in the form of azure-ai-ml's models."""
PLENTY = 100


class Questions:
    """Answers set by a test. ``actions`` and ``not_actions`` sum up the caller's roles; ``used`` are cores by machine
    size.

    The limits are the plane's ``quotas``; those in ``unlisted`` are in no list. ``identity`` is the workspace's.
    ``about`` holds its other properties: ``publicNetworkAccess``, ``managedNetwork``.
    """

    def __init__(self, plane: Plane) -> None:
        self.actions: list[str] = [f"{KIND}/workspaces/*"]
        self.not_actions: list[str] = [f"{KIND}/workspaces/delete"]
        self.used: dict[str, int] = {}
        self.unlisted: set[str] = set()
        self.identity: dict[str, Any] = {"type": "SystemAssigned"}
        self.about: dict[str, Any] = {"publicNetworkAccess": "Enabled"}
        self._plane = plane
        where = rf"/subscriptions/([^/]+)/providers/{re.escape(KIND)}/locations/([^/]+)"
        route = plane.wire.route
        path = f"{re.escape(plane.id)}/providers/Microsoft.Authorization/permissions"
        route("GET", path, "GET permissions", self._permissions)
        route("GET", f"{where}/vmSizes", "GET vmSizes", self._sizes)
        route("GET", f"{where}/usages", "GET usages", self._usages)

    def _permissions(self, call: Call) -> Answer:
        return Answer({"value": [{"actions": self.actions, "notActions": self.not_actions, "dataActions": []}]})

    def _sizes(self, call: Call) -> Answer:
        rows = [
            {"name": name, "family": family, "vCPUs": cores, "gpus": 0, "lowPriorityCapable": True}
            for name, (family, _, cores) in SIZES.items()
        ]
        return Answer({"value": rows})

    def _usages(self, call: Call) -> Answer:
        """Answer in two pages."""
        rows = [self._usage("Total Cluster Dedicated Regional vCPUs", 0, PLENTY)]
        for name, (_, called, _cores) in SIZES.items():
            if name not in self.unlisted:
                rows.append(self._usage(called, self.used.get(name, 0), self._plane.quotas.get(name, PLENTY)))
        low = min(self._plane.quotas.values(), default=PLENTY)
        rows.append(self._usage("Total Cluster LowPriority Regional vCPUs", 0, low))
        if "$skip" in call.query:
            return Answer({"value": rows[1:]})
        return Answer({"value": rows[:1], "nextLink": f"{self._plane.url}{call.url}&$skip=1"})

    def _usage(self, name: str, used: int, limit: int) -> dict[str, Any]:
        return {
            "type": f"{KIND}/usages",
            "unit": "Count",
            "currentValue": used,
            "limit": limit,
            "name": {"value": name, "localizedValue": name},
        }
