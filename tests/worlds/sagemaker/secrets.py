"""A job's role as its containers have it: credentials at an address, and Secrets Manager."""

from __future__ import annotations

import datetime
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from .strict import model_errors
from .wire import Caller, Refusal, Wire

__all__ = ["Roles"]


class Roles:
    """Credentials of roles, and the secrets that they may read: ``values`` by ARN. ``denied`` roles read none."""

    def __init__(self, wire: Wire) -> None:
        self.values: dict[str, str] = {}
        self.denied: set[str] = set()
        self._wire, self._lock = wire, threading.Lock()
        self._owners: dict[str, str] = {}
        wire.services["secretsmanager"] = self.answer

    def offer(self, job: str, role: str) -> str:
        """Create credentials of the role for a job. Return the path at which its containers find them."""
        path, token = f"/v2/credentials/{job}", secrets.token_hex(16)
        key = f"ASIA{secrets.token_hex(8).upper()}"
        with self._lock:
            self._owners[key] = role
            self._wire.keys[key] = secret = secrets.token_hex(20)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
        page = {
            "RoleArn": role,
            "AccessKeyId": key,
            "SecretAccessKey": secret,
            "Token": token,
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self._wire.pages[path] = lambda: page
        return path

    def answer(self, operation: str, request: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
        """Answer one call of Secrets Manager."""
        if operation != "GetSecretValue":
            raise Refusal("UnknownOperationException", operation)
        if problems := model_errors(operation, request, "secretsmanager"):
            raise Refusal("InvalidParameterException", "; ".join(problems))
        role, arn = self._owners.get(caller.key, "nobody"), request["SecretId"]
        if role == "nobody" or role in self.denied or caller.service != "secretsmanager":
            text = f"User: {role} is not authorized to perform: secretsmanager:GetSecretValue on resource: {arn}"
            raise Refusal("AccessDeniedException", text)
        if arn.startswith("arn:") and arn.split(":")[3] != caller.region:
            raise Refusal("ResourceNotFoundException", "Secrets Manager can't find the specified secret.")
        found = {key: value for key, value in self.values.items() if arn in (key, key.rpartition(":")[2][:-7])}
        if not found:
            raise Refusal("ResourceNotFoundException", "Secrets Manager can't find the specified secret.")
        ((key, value),) = found.items()
        name = key.rpartition(":")[2]
        return {"ARN": key, "Name": name[:-7], "SecretString": value, "VersionId": "0" * 32}
