"""Huawei's SDK as an oracle. It has its own folder, last on the path, because it is not a dependency."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from typing import Any

import pytest

__all__ = ["answered", "body_errors", "client", "needed", "package"]

BASIC: dict[str, Any] = {
    "str": str, "int": int, "float": (int, float), "bool": bool, "object": object, "dict": dict,
}  # fmt: skip


@functools.cache
def package(name: str) -> Any:
    """Return a module of the SDK, or None without the SDK."""
    folder = os.environ.get("HUAWEI_FOLDER", "")
    if not folder:
        return None
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def needed(name: str) -> Any:
    """Return a module of the SDK. Without it, skip the test, or fail where everything is required."""
    found = package(name)
    if found is None:
        fail = pytest.fail if os.environ.get("CLOUDTRAIN_REQUIRE_ALL") == "1" else pytest.skip
        fail("no folder with Huawei's SDK in HUAWEI_FOLDER; make test sets it")
    return found


def client(url: str, project: str, ak: str, sk: str, token: str | None = None) -> Any:
    """Return Huawei's own client of ModelArts, at ``url``."""
    sdk = needed("huaweicloudsdkmodelarts.v1")
    known = needed("huaweicloudsdkcore.auth.credentials").BasicCredentials(ak, sk, project)
    known = known.with_security_token(token) if token else known
    return sdk.ModelArtsClient.new_builder().with_credentials(known).with_endpoint(url).build()


def body_errors(body: Any) -> list[str]:
    """Return the differences between a body and the SDK's models: unknown keys, wrong types."""
    return _walk(body, "Job", "body")


def answered(value: Any, model: str) -> Any:
    """Return ``value``, an answer of the fake. Where the SDK is installed, its model must know every key."""
    if problems := _walk(value, model, "answer"):
        raise AssertionError("\n".join(problems))
    return value


def _walk(value: Any, kind: str, at: str) -> list[str]:
    models = package("huaweicloudsdkmodelarts.v1.model")
    if models is None:
        return []
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{at}: want a list, is {value!r}"]
        return [row for number, item in enumerate(value) for row in _walk(item, match[1], f"{at}[{number}]")]
    if match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            return [f"{at}: want a table, is {value!r}"]
        return [row for key, item in value.items() for row in _walk(item, match[1], f"{at}.{key}")]
    if kind in BASIC:
        wrong = not isinstance(value, BASIC[kind]) or (isinstance(value, bool) and kind in ("int", "float"))
        return [f"{at}: want {kind}, is {value!r}"] if wrong else []
    model = getattr(models, kind)
    if not hasattr(model, "openapi_types"):
        return []
    if not isinstance(value, dict):
        return [f"{at}: want {kind}, is {value!r}"]
    wire = {name: own for own, name in model.attribute_map.items()}
    found = [f"{at}: {kind} has no {key!r}" for key in value if key not in wire]
    for key, item in value.items():
        if key in wire:
            found += _walk(item, model.openapi_types[wire[key]], f"{at}.{key}")
    return found
