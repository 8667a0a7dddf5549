"""Limits of money and GPU hours: their part in a native request, and the rest for the next attempt."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jobs import Jobs
from rows import for_each

from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.limits import checked_prices, gpus_per_node, hard_limit
from cloudtrain.provider_api.protocol import AttemptInfo, Layout, Provider, Request, Status
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runs.cost import cost_of, seconds_of
from cloudtrain.runs.outcome import unix_time
from cloudtrain.runs.retry import Retry
from cloudtrain.runs.run import Run
from cloudtrain.store.store import Store
from cloudtrain.testing.tables import Sample

HOUR = 3600.0
T0 = 1.7e9


@dataclass(frozen=True)
class Cloud:
    """A list of two GPUs of which the second is dearer and has more; ``names`` are the machines, with their prices."""

    gpus: tuple[str, str]
    prices: Mapping[str, float]
    seconds: Any

    @property
    def dearest(self) -> float:
        return max(self.prices.values())


CLOUDS = {
    "sagemaker": Cloud(
        ("A10G:1", "A10G:4"),
        {"ml.g5.xlarge": 1.5, "ml.g5.12xlarge": 8.0},
        lambda body: body["StoppingCondition"]["MaxRuntimeInSeconds"],
    ),
    "azureml": Cloud(
        ("T4:1", "T4:4"),
        {"Standard_NC4as_T4_v3": 0.5, "Standard_NC64as_T4_v3": 4.0},
        lambda body: body["limits"]["timeout"],
    ),
    "vertex": Cloud(
        ("T4:1", "T4:4"),
        {"n1-standard-4+T4:1": 0.5, "n1-standard-16+T4:4": 4.0},
        lambda body: int(body["jobSpec"]["scheduling"]["timeout"].removesuffix("s")),
    ),
}


def made(name: str, **settings: Any) -> Provider:
    """Return the provider with its sample settings and the prices of `CLOUDS`."""
    sample = Sample.of(find_provider(name))
    return find_provider(name)(**{**sample.settings, "prices": dict(CLOUDS[name].prices), **settings})


def job_for(name: str, **fields: Any) -> Job:
    sample = Sample.of(find_provider(name))
    return Job.make(entry_point="train.py", **{**sample.job, "gpu": CLOUDS[name].gpus, "instance_count": 2, **fields})


def layout_for(name: str) -> Layout:
    return Layout(store=Sample.of(find_provider(name)).store, run_id="r", code_digest="c" * 64, runtime_digest="d" * 64)


@pytest.mark.parametrize("name", CLOUDS)
def test_both_become_the_platform_s_own_limit(name: str) -> None:
    """The dearest machine of the list counts, and the one with the most GPUs, also if the first is requested."""
    cloud, provider, layout = CLOUDS[name], made(name), layout_for(name)

    def seconds(gpu_index: int = 0, **fields: Any) -> int:
        return int(cloud.seconds(provider.plan(job_for(name, **fields), layout, gpu_index=gpu_index).body))

    assert seconds() == 86400
    for gpu_index in (0, 1):
        assert seconds(gpu_index, max_cost=2 * cloud.dearest) == 3600
        assert seconds(gpu_index, max_gpu_hours=4) == 1800
        assert seconds(gpu_index, max_gpu_hours=4, max_cost=0.5 * cloud.dearest) == 900
        assert seconds(gpu_index, max_gpu_hours=4, max_cost=1e6, max_runtime="10m") == 600
    assert seconds(gpu=cloud.gpus[0], max_gpu_hours=4) == 7200
    notes = provider.plan(job_for(name, max_gpu_hours=4, max_cost=1e4), layout).notes
    assert any(note == "max_gpu_hours 4 is 1800 s of 8 GPUs: that is the limit now" for note in notes), notes
    notes = provider.plan(job_for(name, max_gpu_hours=4, max_runtime=60), layout).notes
    assert any(note.startswith("max_runtime 60 s is the limit now: max_gpu_hours 4 is") for note in notes), notes


@pytest.mark.parametrize("name", CLOUDS)
def test_a_limit_that_cannot_be_kept_is_refused_by_name(name: str) -> None:
    layout, provider = layout_for(name), made(name)
    for field, fields, words in (
        ("max_gpu_hours", {"gpu": (), "max_gpu_hours": 1}, "has no GPU"),
        ("max_gpu_hours", {"max_gpu_hours": 0.0001}, "is not enough for"),
    ):
        with pytest.raises(SpecError, match=words) as caught:
            provider.plan(job_for(name, **fields), layout)
        assert caught.value.field == field
    unpriced = made(name, prices={})
    assert unpriced.plan(job_for(name, max_gpu_hours=4), layout), "that one needs no price"
    with pytest.raises(UnsupportedError, match=r"--set prices\..*=USD"):
        unpriced.plan(job_for(name, max_cost=4), layout)
    prices = dict(CLOUDS[name].prices)
    prices.popitem()
    with pytest.raises(UnsupportedError, match="no price of"):
        made(name, prices=prices).plan(job_for(name, max_cost=4), layout)


def test_more_money_than_seconds_can_be_counted() -> None:
    job = Job.make(entry_point="t.py", max_cost=9e11, max_gpu_hours=9e11, gpu="X:1", max_runtime=60)
    seconds, (note,) = hard_limit(job, "p", lambda _: ["x"], gpu_index=0, own={"x": 1e-308})
    assert seconds == 60
    assert note.startswith("max_runtime 60 s is the limit now")


def test_a_machine_of_which_nobody_knows_the_gpus() -> None:
    job = Job.make(entry_point="t.py", max_gpu_hours=1, instance_type="x")
    with pytest.raises(UnsupportedError, match="the number of GPUs of x is unknown"):
        hard_limit(job, "sagemaker", lambda _: ["x"], gpu_index=0, own={})
    assert gpus_per_node("vertex", "n1-standard-4", job, 0) == 0
    assert gpus_per_node("vertex", "n1-standard-4+T4:2", job, 0) == 2
    assert gpus_per_node("vertex", "a2-highgpu-4g", job, 0) == 4


@for_each("prices", [{"a": 0}, {"a": "1"}, {"a": True}, {"a": float("inf")}, {"a": -1}, {"a": 10**400}, [1], "1"])
def test_what_is_no_price(prices: Any) -> None:
    with pytest.raises(SpecError, match="US dollars an hour") as caught:
        checked_prices(prices, "p")
    assert caught.value.field == "p.prices"


# ------------------------------------------------------------------------------------------------------ across attempts


def begun(tmp_path: Path, name: str, job: Job, ends: list[Status]) -> tuple[Run, list[Request]]:
    """Return a run whose first attempt was sent, with a provider that plans as usual. Its jobs are in memory and have
    ``ends``."""
    kind, sent = find_provider(name), list[Request]()

    class InMemory(kind):  # type: ignore[misc, valid-type]
        def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
            sent.append(request)
            return str(request.attempt)

        def find(self, request: Request) -> str | None:
            return None

        def status(self, native_id: str) -> Status:
            return ends[int(native_id)]

    sample = Sample.of(kind)
    provider = InMemory(**{**sample.settings, "prices": dict(CLOUDS[name].prices)})
    store, layout = Store(str(tmp_path)), layout_for(name)
    plain = {**vars(layout), "inputs": {}}
    store.create_run(layout, {"job": job.to_dict(), "provider": name, "settings": {}, "layout": plain})
    request = provider.plan(job, layout)
    store.write_container(layout_in(store), request.context, b"k" * 32)
    store.create_attempt("r", 0, request)
    store.write_submitted("r", 0, "0")
    return Run(store=store, run_id="r", provider=provider, clock=lambda: T0 + 1000), sent


def layout_in(store: Store) -> Layout:
    return Layout(store=store.url, run_id="r", code_digest="c", runtime_digest="d")


def failed(machine: str, *, started: float | None = T0, finished: float | None = T0 + 900, **more: Any) -> Status:
    return Status(
        **{
            "state": "failed",
            "native": "Failed",
            "category": "infra",
            "reason": "x",
            "instance_type": machine,
            "started": started,
            "finished": finished,
            **more,
        }
    )


@pytest.mark.parametrize("name", CLOUDS)
def test_a_second_attempt_has_what_the_first_left(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt took a quarter of an hour on two nodes. The platform reports no bill."""
    monkeypatch.setattr("cloudtrain.runs.retry.write_context", lambda *_: None)  # the store of the plan is in no cloud
    cloud = CLOUDS[name]
    machine = next(iter(cloud.prices))
    cheap = cloud.prices[machine]
    for number, (limit, seconds, left) in enumerate(
        (
            ({"max_cost": 2 * cloud.dearest}, 3600, 3600 - 900 * cheap / cloud.dearest),
            ({"max_gpu_hours": 8}, 3600, 3600 - 900 / 4),
        )
    ):
        job = job_for(name, retries=1, **limit)
        folder = tmp_path / str(number)
        run, sent = begun(folder, name, job, [failed(machine), replace(failed(machine), state="succeeded")])
        first = run.store.attempt_request("r", 0)
        assert first is not None
        assert cloud.seconds(first.body) == seconds
        run.wait(retry=Retry(run, clock=lambda: T0 + 1000))
        assert [cloud.seconds(request.body) for request in sent] == [pytest.approx(left, abs=2)]


@pytest.mark.slow
def test_on_this_machine_the_supervisor_counts_all_attempts(tmp_path: Path) -> None:
    """The run costs a dollar a second. The second attempt has only what the first left."""
    script = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        if os.environ["CLOUDTRAIN_ATTEMPT"] == "0.0":
            time.sleep(2)
            raise SystemExit("once")
        time.sleep(60)
    """
    money = ("--set", "prices.localhost=3600", "--max-cost", "6", "--retries", "1", "--run-id", "paid")
    with closing(Jobs(tmp_path)) as jobs:
        jobs.write("train.py", script)
        done = jobs.cli("submit", "train.py", "--max-runtime", "10m", *money, "--json")
    assert (done.code, done.json["category"]) == (6, "timeout"), done.err
    assert "price: about 3600.00 USD an hour for 1 x localhost, 6.00 USD until the hard limit of 6s" in done.err
    first, second = done.json["attempts"]
    began, stopped = (unix_time(second[name]) for name in ("started", "ended"))
    assert began is not None
    assert stopped is not None
    assert stopped - began < 6 - 2 + 1, "less than the whole, by what the first took"
    assert first["reason"]
    assert done.json["cost"]["limit_usd"] == 6.0
    assert done.json["cost"]["estimate_usd"] == pytest.approx(6, abs=2)


def priced(name: str, **prices: float) -> Provider:
    """Return a provider of this name whose account has these prices."""
    return cast(Provider, SimpleNamespace(name=name, settings=SimpleNamespace(prices=prices)))


def used(status: Status, *infos: AttemptInfo, now: float = T0 + HOUR, **fields: Any) -> tuple[Any, Any]:
    attempts = [replace(info, native_id="n") for info in infos]
    job = Job.make(**{"entry_point": "t.py", "instance_count": 3, "gpu": "X:4", **fields})
    cost = cost_of(job, priced("p", m=2.0), {"n": status}, attempts, lambda native: None, now)
    return cost["estimate_usd"], cost["gpu_hours"]


def test_each_attempt_counts_the_nodes_that_it_asked_for() -> None:
    """Test three nodes of four GPUs at 2 USD an hour, and later one node."""
    infos = [AttemptInfo(number="0.0", started=T0, ended=T0 + 1800, nodes=3)]
    infos += [AttemptInfo(number="0.1", started=T0 + 1800, ended=T0 + 5400, nodes=1)]
    assert used(failed("m", finished=T0 + 5400), *infos) == ((1.5 + 1) * 2, (1.5 + 1) * 4)


def test_what_a_platform_does_not_tell_is_counted_from_starts_and_ends() -> None:
    first = AttemptInfo(number="0.0", started=T0, ended=T0 + 900)
    ended = failed("m", finished=T0 + 1800)
    assert used(ended, first) == (1.5, 3.0)
    assert used(ended, replace(first, ended=None)) == (3.0, 6.0), "until its native job ended"
    assert used(replace(ended, state="running", finished=None), replace(first, ended=None)) == (6.0, 12.0), "until now"
    again = AttemptInfo(number="0.1", started=T0 + 1200, ended=T0 + 1800)
    assert used(ended, replace(first, ended=None), again) == (3.0, 6.0), "until the next began"
    assert used(replace(ended, billed_s=HOUR), first) == (2.0, 4.0), "the platform knows better"
    assert used(replace(ended, billed_s=900.0), first) == (0.5, 3.0), "what spot saves are no GPU hours"
    assert used(replace(ended, cost_usd=0.5), first)[0] == 0.5
    assert used(failed("m", started=None, finished=None)) == (0.0, 0.0), "no machines ever came"
    assert used(failed("m", started=None, finished=None, native="")) == (None, None), "and of this nobody knows"
    assert used(replace(ended, instance_type="unknown"), first) == (None, 3.0)
    assert seconds_of([(None, None), (1.0, None), (3.0, 4.0), (9.0, None)], 10.0) == 4.0


def test_a_dated_price_of_the_service_is_one_and_another_s_is_none() -> None:
    """The shipped list has Azure ML's own prices of 2024, and for SageMaker only those of EC2."""
    info = AttemptInfo(number="0.0", native_id="n", started=T0, ended=T0 + HOUR)
    for provider, machine, told in (
        ("azureml", "Standard_NC4as_T4_v3", (0.526, "2024-09-19", 1.0)),
        ("sagemaker", "ml.p5.48xlarge", (None, None, 8.0)),
    ):
        job, ended = Job.make(entry_point="t.py"), failed(machine, finished=T0 + HOUR)
        cost = cost_of(job, priced(provider), {"n": ended}, [info], lambda native: None, T0)
        assert (cost["estimate_usd"], cost["priced_on"], cost["gpu_hours"]) == told
