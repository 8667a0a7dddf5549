"""Provider ``modelarts`` against Huawei's own SDK: signatures both ways, bodies, answers, and objects in OBS."""

from __future__ import annotations

import os
import random
import socket
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import huawei
import pytest
from rows import for_each
from worlds.modelarts.plane import AK, PROJECT, SK, Plane

from cloudtrain.doctor.doctor import round_trip
from cloudtrain.errors import SpecError
from cloudtrain.providers.modelarts import Provider
from cloudtrain.providers.modelarts.signing import query_string, signed_headers
from cloudtrain.providers.modelarts.validate import _models
from cloudtrain.storage import obs
from cloudtrain.storage.files import files
from cloudtrain.storage.obs import HuaweiKeys
from cloudtrain.testing.tables import PLATFORM, SCRIPT, Place, Sample, plan_of, platform_rows

pytestmark = pytest.mark.remote

REQUESTS = 1000
CHARS = string.ascii_letters + string.digits + " -_.~!*'()&=+/%äß漢"


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    with Plane(tmp_path / "huawei") as plane:
        for name, value in plane.environ().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(obs, "_proven", set())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield plane


def random_request(at: random.Random) -> dict[str, Any]:
    def text(most: int = 12) -> str:
        return "".join(at.choices(CHARS, k=at.randint(1, most)))

    path = "/v2/" + "/".join(quote(text().replace("/", ""), safe="~") for _ in range(at.randint(1, 4)))
    return {
        "method": at.choice(["GET", "POST", "PUT", "DELETE"]),
        "path": path + at.choice(["", "/"]),
        "query": [(f"{text(6)}{n}", text()) for n in range(at.randint(0, 4))],
        "headers": {"Host": "modelarts.example", "Content-Type": at.choice(["application/json", "text/plain"])},
        "body": at.randbytes(at.randint(0, 60)),
        "token": at.choice(["", text()]),
    }


def signed_by_sdk(case: dict[str, Any], headers: dict[str, str]) -> dict[str, str]:
    core = huawei.needed("huaweicloudsdkcore.signer.signer")
    request = huawei.needed("huaweicloudsdkcore.sdk_request").SdkRequest(
        method=case["method"],
        host="modelarts.example",
        resource_path=case["path"],
        query_params=list(case["query"]),
        header_params=dict(headers),
        body=case["body"],
    )
    known = huawei.needed("huaweicloudsdkcore.auth.credentials").BasicCredentials(AK, SK, PROJECT)
    found = core.Signer(known).sign(request)
    assert found.uri.partition("?")[2] == query_string(case["query"])
    return dict(found.header_params)


def test_a_thousand_requests_have_the_signature_of_the_sdk() -> None:
    """Check that equal signatures verify each other, whether cloudtrain or the SDK signs first."""
    at = random.Random(32)
    for _ in range(REQUESTS):
        case = random_request(at)
        keys = HuaweiKeys(AK, SK, case["token"])
        made = signed_headers(keys, case["method"], case["path"], case["query"], case["headers"], case["body"])
        ours = made.pop("Authorization")
        assert ours == signed_by_sdk(case, made)["Authorization"], case
        theirs = signed_by_sdk(case, case["headers"])
        wanted = theirs.pop("Authorization")
        again = signed_headers(HuaweiKeys(AK, SK), case["method"], case["path"], case["query"], theirs, case["body"])
        assert again["Authorization"] == wanted, case


def test_the_fake_accepts_requests_only_if_the_sdk_signed_them(plane: Plane) -> None:
    sdk = huawei.needed("huaweicloudsdkmodelarts.v1")
    failed = huawei.needed("huaweicloudsdkcore.exceptions.exceptions").ClientRequestException
    query = sdk.ListTrainingJobsRequest(body=sdk.JobSearches(offset=0, limit=50))
    assert huawei.client(plane.url, PROJECT, AK, SK).list_training_jobs(query).total == 0
    ak, sk, token = plane.temporary()
    assert huawei.client(plane.url, PROJECT, ak, sk, token).list_training_jobs(query).total == 0
    for wrong in ((AK, "another", None), (ak, sk, "another"), (ak, sk, None)):
        with pytest.raises(failed):
            huawei.client(plane.url, PROJECT, *wrong).list_training_jobs(query)


@for_each("field", [*PLATFORM, *SCRIPT])
def test_every_planned_body_passes_the_models_of_the_sdk(field: str, tmp_path: Path) -> None:
    huawei.needed("huaweicloudsdkmodelarts.v1.model")
    sample = Sample.of(Provider)
    table = SCRIPT if field in SCRIPT and field not in PLATFORM else platform_rows(Provider)
    for number, own in enumerate((sample.settings, {**sample.settings, "pool_id": "pool-1", "priority": 2})):
        place = Place(
            tmp_path / f"{field}-{number}-{len(list(tmp_path.iterdir()))}",
            store=sample.store,
            provider="modelarts",
            secret=sample.secret,
        )
        row = table[field]
        try:
            plan = plan_of(Provider(**own), place, sample.job, row.base(place), row.change(place))
        except SpecError:
            continue  # the contract suite checks refusals
        assert huawei.body_errors(plan.request.body) == []


def test_the_table_of_models_is_that_of_the_sdk() -> None:
    models = huawei.needed("huaweicloudsdkmodelarts.v1.model")
    for name, known in _models()["models"].items():
        own = getattr(models, name)
        assert known == {own.attribute_map[key]: kind for key, kind in own.openapi_types.items()}


def test_a_strict_walk_finds_each_error() -> None:
    huawei.needed("huaweicloudsdkmodelarts.v1.model")
    assert huawei.body_errors({"metadata": {"nam": "x"}, "spec": {"resource": {"node_count": "2"}}}) == [
        "body.metadata: JobMetadata has no 'nam'",
        "body.spec.resource.node_count: want int, is '2'",
    ]


def test_the_official_client_and_cloudtrain_read_the_same_answers(plane: Plane, tmp_path: Path) -> None:
    """Check a job of a missing image: cloudtrain creates it, and both clients read it through all its phases."""
    sdk, sample = huawei.needed("huaweicloudsdkmodelarts.v1"), Sample.of(Provider)
    plane.no_machines = True
    provider = Provider(**sample.settings)
    place = Place(tmp_path / "place", store=sample.store, provider="modelarts", secret=sample.secret)
    request = plan_of(provider, place, sample.job, {"instance_count": 2}).request
    native = provider.submit(request)
    id = native.rpartition("/")[2]
    client = huawei.client(plane.url, PROJECT, AK, SK)

    def both() -> tuple[Any, Any]:
        theirs = client.show_training_job_details(sdk.ShowTrainingJobDetailsRequest(training_job_id=id))
        return theirs, provider.account.describe(native)

    theirs, ours = both()
    assert (theirs.metadata.name, theirs.status.phase) == (ours["metadata"]["name"], ours["status"]["phase"])
    assert theirs.status.tasks == ours["status"]["tasks"] == ["worker-0", "worker-1"]
    assert theirs.algorithm.command == ours["algorithm"]["command"] == request.body["algorithm"]["command"]
    search = sdk.JobSearches(offset=0, limit=50, filters=[sdk.Filter("name", "like", ["contract"])])
    listed = client.list_training_jobs(sdk.ListTrainingJobsRequest(body=search))
    assert [job.metadata.id for job in listed.items] == [id]
    assert provider.find(request) == native
    flavors = client.show_training_job_flavors(sdk.ShowTrainingJobFlavorsRequest()).flavors
    assert "modelarts.vm.cpu.2u" in [flavor.flavor_id for flavor in flavors]
    stopped = client.stop_training_job(
        sdk.StopTrainingJobRequest(training_job_id=id, body=sdk.JobActionType(action_type="terminate"))
    )
    assert stopped.status_code == 202
    plane.jobs[id].wait()
    theirs, ours = both()
    assert theirs.status.phase == ours["status"]["phase"] == "Terminated"
    assert provider.status(native).state == "cancelled"
    failed = huawei.needed("huaweicloudsdkcore.exceptions.exceptions").ClientRequestException
    with pytest.raises(failed) as caught:
        client.show_training_job_details(sdk.ShowTrainingJobDetailsRequest(training_job_id="none"))
    assert (caught.value.status_code, caught.value.error_code) == (404, "ModelArts.2757")


# ------------------------------------------------------------------------------------------------------------------ OBS


@pytest.fixture
def theirs(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give Huawei's own client of OBS with a host name for this machine: at a bare address it signs as AWS once did."""
    resolve = socket.getaddrinfo

    def resolved(host: Any, *args: Any, **named: Any) -> Any:
        return resolve("127.0.0.1" if str(host).endswith(".example") else host, *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    server = plane.url.replace("127.0.0.1", "obs.cn-north-4.example")
    client = huawei.needed("obs").ObsClient(access_key_id=AK, secret_access_key=SK, server=server)
    yield client
    client.close()


def test_both_clients_read_the_same_objects(plane: Plane, theirs: Any, tmp_path: Path) -> None:
    plane.obs.make("both")
    ours = files("obs://both/store")
    data = random.Random(1).randbytes(9 << 20)
    (tmp_path / "large").write_bytes(data)
    ours.write("a/ä b+c.txt", b"ours")
    ours.upload(tmp_path / "large", "large")
    assert theirs.putContent("both", "store/theirs.txt", "theirs").status == 200
    assert theirs.getObject("both", "store/a/ä b+c.txt", loadStreamInMemory=True).body.buffer == b"ours"
    assert theirs.getObject("both", "store/large", loadStreamInMemory=True).body.buffer == data
    assert ours.read("theirs.txt") == b"theirs"
    listed = theirs.listObjects("both", prefix="store/").body.contents
    assert {item.key.removeprefix("store/"): item.size for item in listed} == ours.list()
    ours.download("large", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == data
    ours.copy("theirs.txt", "copied.txt")
    ours.remove("a")
    assert theirs.deleteObject("both", "store/large").status == 204
    assert sorted(ours.list()) == ["copied.txt", "theirs.txt"]
    assert ours.names() == ["copied.txt", "theirs.txt"]
    assert ours.create("record", b"ours")
    header = {"x-obs-forbid-overwrite": "true"}
    assert theirs.putContent("both", "store/record", "x", extensionHeaders=header).status == 409
    assert ours.read("record") == b"ours"
    assert [key for key in plane.obs.keys_of("both") if "probe" in key] == []


@for_each("kind", ["overwrites", "parallel"])
def test_a_bucket_that_cannot_create_exclusively_is_refused(plane: Plane, kind: str) -> None:
    plane.obs.make("plain")
    getattr(plane.obs, kind).add("plain")
    with pytest.raises(SpecError) as caught:
        files("obs://plain/store").create("record", b"1")
    assert "\n" not in caught.value.message
    assert caught.value.field == "store"
    assert plane.obs.keys_of("plain") == []


def test_doctor_finds_a_store_in_obs_fit(plane: Plane) -> None:
    plane.obs.make("fit")
    assert round_trip(files("obs://fit/store")).status == "ok"
    assert plane.obs.keys_of("fit") == []
    plane.obs.make("unfit")
    plane.obs.overwrites.add("unfit")
    found = round_trip(files("obs://unfit/store"))
    assert (found.status, "does not refuse to overwrite" in found.detail) == ("failed", True)


def test_a_bucket_is_probed_once(plane: Plane) -> None:
    plane.obs.make("once")
    for name in ("a", "b"):
        assert files("obs://once/store").create(name, b"1")
    assert plane.wire.count("HEAD object") - sum(call.path.count("/") > 1 for call in plane.wire.calls) < 2
    assert sum("probe-" in call.path for call in plane.wire.calls) == 3, "two creations, one removal"


def test_the_bucket_is_part_of_the_host(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this because a proxy gets the host that a client calls. At a bare address the bucket is in the path."""
    plane.obs.make("virtual")
    monkeypatch.setenv("OBS_ENDPOINT", "http://obs.cn-north-4.example")
    monkeypatch.setenv("http_proxy", plane.url)
    store = files("obs://virtual/store")
    assert store.create("a", b"1")
    store.write("b", b"2")
    assert store.list() == {"a": 1, "b": 1}
    assert {call.headers["host"] for call in plane.wire.calls} == {"virtual.obs.cn-north-4.example"}


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_later_processes_probe_a_bucket_once_a_day(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: bool
) -> None:
    """Check that this needs a folder of cloudtrain in the user's cache, and a host name: any server may have an
    address."""
    if cache:
        (tmp_path / "cache/cloudtrain").mkdir(parents=True)
    plane.obs.make("daily")

    def probes(name: str) -> int:
        monkeypatch.setattr(obs, "_proven", set())
        plane.wire.calls.clear()
        assert files("obs://daily/store").create(name, b"1")
        return sum(call.method == "PUT" and "probe-" in call.path for call in plane.wire.calls)

    assert (probes("a"), probes("b")) == (2, 2)
    monkeypatch.setenv("OBS_ENDPOINT", "http://obs.cn-north-4.example")
    monkeypatch.setenv("http_proxy", plane.url)
    assert (probes("c"), probes("d")) == (2, 0 if cache else 2)
    for path in (tmp_path / "cache").rglob("buckets/*"):
        os.utime(path, (0, time.time() - obs.PROBED_SECONDS - 1))
    assert probes("e") == 2


def test_the_secret_travels_with_temporary_keys(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.obs.make("temporary")
    ak, sk, token = plane.temporary()
    for name, value in (("AK", ak), ("SK", sk), ("SECURITY_TOKEN", token)):
        monkeypatch.setenv(f"HUAWEICLOUD_SDK_{name}", value)
    store = files("obs://temporary/store")
    assert store.create("a", b"1")
    assert store.read("a") == b"1"
    began = time.monotonic()
    assert Provider(**Sample.of(Provider).settings).account.principal() == ak
    assert time.monotonic() - began < 5
