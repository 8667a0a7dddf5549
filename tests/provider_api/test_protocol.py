"""The provider border: layouts, requests and simulations as plain data, options merged in, providers found by name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.errors import NotFoundError, SpecError, UnsupportedError
from cloudtrain.job.job import Input, Job
from cloudtrain.job.options import merge_options
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from cloudtrain.provider_api.node import PROTOCOL
from cloudtrain.provider_api.protocol import Layout, LayoutInput, Provider, Request, Status, check_inputs, context_of
from cloudtrain.provider_api.registry import find_provider, provider_names

LAYOUT = Layout(
    store="s3://b/p",
    run_id="r-1",
    code_digest="c" * 64,
    runtime_digest="d" * 64,
    inputs={"train": LayoutInput(url="file:///data/x", file="x.csv"), "val": LayoutInput(url="s3://b/v", mode="copy")},
    resume="s3://b/old/live/checkpoints",
)


# ----------------------------------------------------------------------------------------------------------- the layout


def test_every_url_of_a_run() -> None:
    assert LAYOUT.run == "s3://b/p/runs/r-1"
    assert LAYOUT.live == "s3://b/p/runs/r-1/live"
    assert LAYOUT.native == "s3://b/p/runs/r-1/native"
    assert LAYOUT.context == "s3://b/p/runs/r-1/container/context.json"
    assert LAYOUT.key == "s3://b/p/runs/r-1/container/key"
    assert LAYOUT.code == f"s3://b/p/code/{'c' * 64}/code.tar.gz"
    assert LAYOUT.runtime == f"s3://b/p/runtime/{'d' * 64}/cloudtrain.pyz"
    assert LAYOUT.attempt(2) == "s3://b/p/runs/r-1/attempts/2"


def test_plain_forms_round_trip() -> None:
    assert Layout.from_dict(json.loads(json.dumps(dataclasses.asdict(LAYOUT)))) == LAYOUT
    request = Request(provider="x", operation="o", body={"a": [1]}, context={"b": None}, run=LAYOUT.run, attempt=1)
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    second = dataclasses.replace(request, gpu_index=1)
    assert second.to_dict()["choice"] == 1, "the key of every record so far"
    assert Request.from_dict(second.to_dict()) == second
    simulation = LaunchSpec(
        nodes=(NodeSpec(command=["a"], mounts=(Mount(url="u", path="p", kind="sync"),), env={"A": "1"}),) * 2,
        rules=LaunchRules(time_limit=5, restart_on=[75]),
    )
    assert LaunchSpec.from_dict(json.loads(json.dumps(simulation.to_dict()))) == simulation


@for_each("data", [{}, {"nodes": 3, "rules": {}}, {"nodes": [{}], "rules": {"time_limit": 1}},
                                  {"nodes": [{"command": [], "mounts": [{}]}], "rules": {}}])  # fmt: skip
def test_what_is_no_simulation_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="not a launch spec"):
        LaunchSpec.from_dict(data)


@for_each(
    ("part", "values", "field", "words"),
    [
        ("rules", {"restart_on": 75}, "rules.restart_on", "a list of exit codes"),
        ("rules", {"restart_on": ["75"]}, "rules.restart_on", "a list of exit codes"),
        ("rules", {"restart_on": [True]}, "rules.restart_on", "a list of exit codes"),
        ("rules", {"stop_signal": "SIGNOTHING"}, "rules.stop_signal", "a signal's name"),
        ("rules", {"stop_signal": "Signals"}, "rules.stop_signal", "a signal's name"),
        ("rules", {"stop_signal": 15}, "rules.stop_signal", "a signal's name"),
        ("rules", {"stop_grace": "soon"}, "rules.stop_grace", "a number"),
        ("rules", {"stop_grace": float("nan")}, "rules.stop_grace", "a number"),
        ("rules", {"retries": 0.5}, "rules.retries", "a whole number"),
        ("rules", {"max_restarts": -1}, "rules.max_restarts", "a whole number"),
        ("rules", {"max_restart": 1}, "rules.max_restart", "did you mean 'max_restarts'?"),
        ("node", {"entrypoint": "sh"}, "nodes.*.entrypoint", "a list of texts"),
        ("node", {"env": {"A": 1}}, "nodes.*.env", "a table of texts"),
        ("node", {"read_only": 1}, "nodes.*.read_only", "true or false"),
        ("node", {"cpus": True}, "nodes.*.cpus", "a whole number"),
        ("node", {"gpus": None}, "nodes.*.gpus", "a whole number"),
        ("node", {"container": []}, "nodes.*.container", "a table"),
        ("node", {"imgae": "x"}, "nodes.*.imgae", "did you mean 'image'?"),
    ],
)
def test_a_simulation_of_wrong_values_is_refused_by_name(
    part: str, values: dict[str, Any], field: str, words: str
) -> None:
    given: dict[str, dict[str, Any]] = {"node": {"command": ["a"]}, "rules": {"time_limit": 1}}
    given[part] |= values
    with pytest.raises(SpecError) as caught:
        LaunchSpec.from_dict({"nodes": [given["node"]], "rules": given["rules"]})
    assert caught.value.field == field
    assert words in f"{caught.value}; {caught.value.hint}"


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(SpecError, match="not a request"):
        Request.from_dict({"provider": "x", "bdoy": {}})


def test_final_states() -> None:
    assert [Status(state=s).final for s in ("pending", "running", "succeeded", "failed", "cancelled")] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_the_context_is_json_and_holds_everything_the_script_sees() -> None:
    job = Job.make(
        entry_point="t.py", args=["{run_id}"], env={"A": "é"}, hyperparameters={"x": [1, {"y": True}]},
        secrets={"T": "env:T"}, inputs={"train": "/data/x"}, checkpoint_paths=["out/*"], requirements="r.txt",
        instance_count=3, stall_timeout="5m", debug_nccl=True, keep_checkpoints=2,
        metrics={"loss": "loss (.*)"}, max_outputs="2MB",
    )  # fmt: skip
    context = context_of("p", job, LAYOUT, processes=4)
    assert json.loads(json.dumps(context)) == context
    assert context == {
        "protocol": PROTOCOL, "provider": "p", "run_id": "r-1", "run": LAYOUT.run, "name": "t", "code_digest": "c" * 64,
        "nodes": 3, "processes": 4, "launcher": "torchrun", "entry_point": "t.py", "requirements": "r.txt",
        "args": ["{run_id}"], "hyperparameters": {"x": [1, {"y": True}]}, "hyperparameter_style": "flags",
        "env": {"A": "é"}, "secrets": {"T": "env:T"}, "inputs": {"train": {"file": "x.csv"}, "val": {"file": None}},
        "stall_timeout": 300, "debug_nccl": True, "checkpoint_paths": ["out/*"], "keep_checkpoints": 2,
        "metrics": {"loss": "loss (.*)"}, "max_outputs": 2_000_000,
        "checkpoint_url": f"{LAYOUT.run}/checkpoints", "resume": LAYOUT.resume,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- options merged in

BODY = {
    "name": "n",
    "spec": {"image": "i", "env": {"A": "1"}},
    "pools": [{"n": 1, "t": "a"}, {"n": 2, "t": "b"}],
    "tags": [],
}
OWNED = ("name", "spec.image", "pools.*.n")


def merged(options: dict[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(BODY)
    out = merge_options(BODY, options, owned=OWNED, provider="x")
    assert before == BODY
    return out


def test_tables_merge_deeply_and_the_rest_is_replaced() -> None:
    assert merged({"spec": {"env": {"B": "2"}, "extra": {"deep": [1]}}})["spec"] == {
        "image": "i", "env": {"A": "1", "B": "2"}, "extra": {"deep": [1]},
    }  # fmt: skip
    assert merged({"tags": ["a", "b"]})["tags"] == ["a", "b"]
    assert merged({"new": None})["new"] is None
    assert merged({}) == BODY


def test_lists_of_objects_merge_by_index_and_star_means_all() -> None:
    assert merged({"pools": {"1": {"t": "c"}}})["pools"] == [{"n": 1, "t": "a"}, {"n": 2, "t": "c"}]
    assert merged({"pools": {"*": {"disk": 5}}})["pools"] == [
        {"n": 1, "t": "a", "disk": 5}, {"n": 2, "t": "b", "disk": 5},
    ]  # fmt: skip
    # An index takes precedence over the star, in any order.
    assert [p["t"] for p in merged({"pools": {"0": {"t": "z"}, "*": {"t": "s"}}})["pools"]] == ["z", "s"]
    # A new element at the end is allowed if it needs no field of this version.
    assert merged({"tags": {"0": "new"}})["tags"] == ["new"]
    assert merged({"tags": {"1": "b", "0": "a"}})["tags"] == ["a", "b"]
    with pytest.raises(SpecError, match="'2' is no index of that list of 0"):
        merged({"tags": {"2": "c", "0": "a"}})


@for_each("key", ["3", "-1", "x", "1.0", ""])
def test_what_is_no_index_of_a_list_is_refused(key: str) -> None:
    with pytest.raises(SpecError, match="no index of that list of 2") as caught:
        merged({"pools": {key: {"t": "c"}}})
    assert caught.value.field == "options.x.pools"


@for_each(
    ("options", "field"),
    [
        ({"name": "other"}, "options.x.name"),
        ({"name": {"a": 1}}, "options.x.name"),
        ({"spec": {"image": "other"}}, "options.x.spec.image"),
        ({"spec": "gone"}, "options.x.spec"),
        ({"pools": []}, "options.x.pools"),
        ({"pools": {"0": {"n": 9}}}, "options.x.pools.*.n"),
        ({"pools": {"*": {"n": 9}}}, "options.x.pools.*.n"),
        ({"pools": {"0": 5}}, "options.x.pools.*"),
        ({"pools": {"2": {"t": "without n"}}}, "options.x.pools.*"),
    ],
)
def test_what_cloudtrain_sets_cannot_be_changed_nor_replaced_from_above(options: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        merged(options)
    assert caught.value.field == field


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
tables = st.dictionaries(st.text("abc", min_size=1, max_size=2), plain, max_size=4)


@given(tables, tables)
def test_merging_into_tables_is_what_a_reader_expects(body: dict[str, Any], options: dict[str, Any]) -> None:
    def holds_list(into: Any, change: Any) -> bool:
        if isinstance(into, list) and isinstance(change, dict):
            return True
        pairs = (
            [(into.get(k), v) for k, v in change.items()] if isinstance(into, dict) and isinstance(change, dict) else []
        )
        return any(holds_list(a, b) for a, b in pairs)

    if holds_list(body, options):
        return
    out = merge_options(body, options, owned=(), provider="x")
    assert set(out) == set(body) | set(options)
    for key in set(body) - set(options):
        assert out[key] == body[key]
    for key, value in options.items():
        if not (isinstance(value, dict) and isinstance(body.get(key), dict)):
            assert out[key] == value
    assert merge_options(out, options, owned=(), provider="x") == out


# -------------------------------------------------------------------------------------------------------------- by name


def test_own_providers_are_found_and_keep_the_protocol() -> None:
    assert "local" in provider_names()
    for name in provider_names():
        kind = find_provider(name)
        assert kind.name == name
        assert isinstance(kind(), Provider)
        for method in ("plan", "submit", "find", "status", "logs", "cancel", "node_environment", "launch_spec"):
            ours, wanted = inspect.signature(getattr(kind, method)), inspect.signature(getattr(Provider, method))
            assert list(ours.parameters) == list(wanted.parameters), f"{name}.{method}"


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(NotFoundError, match=r"(?s)no provider 'locale'.hint: did you mean 'local'\?") as caught:
        find_provider("locale")
    assert caught.value.field == "provider"
    with pytest.raises(NotFoundError, match=r"(?s)no provider 'x'.hint: choose from .*local"):
        find_provider("x")


THIRD = """
from cloudtrain.providers.local import Provider as Local

class Provider(Local):
    name = "acme"
"""


def entry_point(folder: Path, name: str, target: str) -> None:
    info = folder / "acme_cloudtrain-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-cloudtrain\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[cloudtrain.providers]\n{name} = {target}\n")


def ask(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from cloudtrain.provider_api.registry import *; {code}"],
        env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_third_parties_register_a_provider_as_an_entry_point(tmp_path: Path) -> None:
    entry_point(tmp_path, "acme", "acme_provider:Provider")
    (tmp_path / "acme_provider.py").write_text(THIRD)
    done = ask(tmp_path, "print(find_provider('acme').name, 'acme' in provider_names())")
    assert done.stdout.split() == ["acme", "True"], done.stderr
    assert "did you mean 'acme'?" in ask(tmp_path, "find_provider('acne')").stderr


def test_an_entry_point_cannot_take_the_name_of_our_own(tmp_path: Path) -> None:
    entry_point(tmp_path, "local", "acme_provider:Provider")
    (tmp_path / "acme_provider.py").write_text(THIRD)
    assert ask(tmp_path, "print(find_provider('local').__module__)").stdout.strip() == "cloudtrain.providers.local"


def test_a_module_that_a_provider_itself_misses_is_not_taken_for_an_unknown_provider(tmp_path: Path) -> None:
    entry_point(tmp_path, "acme", "acme_provider:Provider")
    (tmp_path / "acme_provider.py").write_text("import the_vendors_sdk\n")
    done = ask(tmp_path, "find_provider('acme')")
    assert done.stderr.strip().splitlines()[-1] == "ModuleNotFoundError: No module named 'the_vendors_sdk'"


def test_an_input_the_nodes_cannot_read_is_refused_by_name() -> None:
    local = find_provider("local")
    check_inputs(local, {"a": Input(url="/x"), "b": Input(url="s3://b/k"), "c": LayoutInput(url="file:///x")})
    with pytest.raises(UnsupportedError, match=r"it cannot read azureml: URLs") as caught:
        check_inputs(local, {"a": Input(url="/x"), "d": Input(url="azureml:data:1")})
    assert caught.value.field == "inputs.d"
