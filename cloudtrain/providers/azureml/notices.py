"""Read Azure's notices that a machine is about to be taken away. Runs on the node: standard library alone.

A cluster or serverless machine of low priority gets no signal. Its only notice is Scheduled Events of the machine's
metadata service, and Azure may withdraw it (microsoft/ai4s-jobq, 2.5.2). Clusters of Kubernetes make a file instead
(azureml-examples). Cloudtrain has never seen either on a real machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from urllib.parse import urlsplit

__all__ = ["ScheduledEvents", "marker"]

URL = "http://169.254.169.254"
"""The metadata service of every virtual machine of Azure. It may not be asked through a proxy."""
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
TYPES = ("Preempt", "Terminate")
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 120.0
"""Longest wait for the first answer: Azure may take two minutes to turn events on for the machine."""
FILE = "/usr/share/to-be-preempted"


def marker(path: str = FILE) -> str:
    """Return why the node is about to go, by the file of a Kubernetes cluster; empty when it is not."""
    return f"{path} is there" if os.path.exists(path) else ""


class ScheduledEvents:
    """Events of the machine on which this process runs, asked at ``url``.

    A set of machines shares its events, so only one that names this machine counts.
    """

    def __init__(self, url: str = URL) -> None:
        self._url = urlsplit(url)
        self._name = ""

    def __call__(self) -> str | None:
        """Return why the machine is about to go, empty when it is not, None when the service gives no answer."""
        try:
            self._name = self._name or self._get(NAME).strip().lower()
            events = json.loads(self._get(EVENTS))["Events"]
            ours = [event for event in events if event["EventType"] in TYPES and self._named(event)]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, http.client.HTTPException):
            return None
        return f"Azure announced {ours[0]['EventType']} of its machine" if ours else ""

    def _named(self, event: dict[str, object]) -> bool:
        resources = event.get("Resources")
        return isinstance(resources, list) and self._name in [str(name).lower() for name in resources]

    def _get(self, path: str) -> str:
        """Return the answer. http.client uses no proxy. Raises OSError for any status but 200."""
        made = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=CONNECT_SECONDS)
        with contextlib.closing(made) as connection:
            connection.connect()
            connection.sock.settimeout(ANSWER_SECONDS)
            connection.request("GET", self._url.path + path, headers={"Metadata": "true"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"{path}: status {answer.status}")
            return answer.read().decode()
