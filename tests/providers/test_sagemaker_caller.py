"""The caller of this machine: one profile or role signs the requests to SageMaker and to the store.

At the wire: boto3 and obstore call loopback servers that know each request's signer.
"""

from __future__ import annotations

import dataclasses
import http.client
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.sagemaker.plane import REGISTRY, Plane

from cloudtrain.errors import AuthError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout, recorded_settings
from cloudtrain.runs.listing import list_page
from cloudtrain.runs.listing import recorded_runs as listed_runs
from cloudtrain.runs.reconcile import reconcile
from cloudtrain.runs.run import Run, open_run
from cloudtrain.runs.submit import load_plan, make_plan, send_plan
from cloudtrain.settings.settings import Settings
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store

pytestmark = pytest.mark.remote

SIGNER = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/")
ISSUED = re.compile(rb"<AccessKeyId>(\w+)</AccessKeyId>\s*<SecretAccessKey>([^<]+)<")
OWN, ANN, BEN = "AKIAOWN0000000000000", "AKIAANN0000000000000", "AKIABEN0000000000000"
ROLE = "arn:aws:iam::123456789012:role/trainer"
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


class Gate(http.server.ThreadingHTTPServer):
    """A proxy of moto that records signers. ``signed`` holds (service, key, region); ``expired`` keys are refused.

    ``issued`` are the keys that STS has issued, with their secrets.
    """

    daemon_threads = True

    def __init__(self, moto: str) -> None:
        self.moto = moto.removeprefix("http://")
        self.signed: list[tuple[str, str, str]] = []
        self.expired: set[str] = set()
        self.issued: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), _Pass)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def keys(self, service: str) -> set[str]:
        return {key for name, key, _ in self.signed if name == service}


class _Pass(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server: Gate

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        signer = SIGNER.search(self.headers.get("Authorization") or "")
        key, region, service = signer.groups() if signer else ("", "", "")
        self.server.signed.append((service, key, region))
        if key in self.server.expired:  # like S3: a HEAD has no body with a reason
            self._answer(400, {}, b"" if self.command == "HEAD" else EXPIRED)
            return
        there = http.client.HTTPConnection(self.server.moto)
        # This proxy answers "Expect: 100-continue".
        headers = {name: value for name, value in self.headers.items() if name != "Expect"}
        there.request(self.command, self.path, body, headers)
        answer = there.getresponse()
        data = answer.read()
        for pair in ISSUED.findall(data if service == "sts" else b""):
            self.server.issued[pair[0].decode()] = pair[1].decode()
        self._answer(answer.status, dict(answer.getheaders()), data)
        there.close()

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass


@dataclasses.dataclass
class Account:
    gate: Gate
    plane: Plane
    folder: Path
    store: str
    role: str

    def keys(self, **profiles: str) -> None:
        """Write the credentials file with one access key for each profile."""
        text = "".join(f"[{n}]\naws_access_key_id = {k}\naws_secret_access_key = secret\n" for n, k in profiles.items())
        (self.folder / "credentials").write_text(text)
        self.plane.wire.keys |= dict.fromkeys(profiles.values(), "secret")

    def settings(self, **caller: str) -> Settings:
        """Return the settings of a cloudtrain.toml with ``caller``."""
        table = {"region": "eu-west-1", "role": self.role, **caller}
        return Settings(provider="sagemaker", store=self.store, tables={"sagemaker": table})

    def plan(self, settings: Settings, run_id: str = "r", **job: Any) -> Any:
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        (code / "train.py").write_text("print('hello')\n")
        job = Job.make(entry_point="train.py", image=f"{REGISTRY}/team/trainer:1", max_runtime="1h", **job)
        return make_plan(job, settings=settings, run_id=run_id, cwd=code)

    def signers(self) -> set[str]:
        """Return the keys that signed calls to SageMaker."""
        return set(self.plane.wire.callers)


@pytest.fixture
def account(tmp_path: Path, s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    gate, plane = Gate(s3_environment), Plane(tmp_path / "aws", moto=s3_environment, runs=False)
    plane.no_capacity.add("ml.m5.xlarge")
    plane.capacity_seconds = 600.0
    environ = {**plane.environ(), "AWS_ENDPOINT_URL": gate.url, "AWS_ACCESS_KEY_ID": OWN}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    plane.wire.keys = gate.issued = {**plane.wire.keys, OWN: "testing"}
    (tmp_path / "config").write_text("[profile ann]\n[profile ben]\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(CLIENT_TIMINGS, "credentials_age", 0.0)
    store = plane.make_bucket(f"b-{tmp_path.name.replace('_', '-').lower()[-40:]}") + "/store"
    made = Account(gate, plane, tmp_path, store, plane.make_role("training"))
    made.keys(ann=ANN, ben=BEN)
    yield made
    plane.close()
    gate.shutdown()
    gate.server_close()


def test_one_profile_serves_the_platform_and_the_store(account: Account) -> None:
    run = send_plan(account.plan(account.settings(profile="ann")), environ={})
    assert run.status().state == "pending"
    assert account.gate.keys("s3") == {ANN}
    assert account.signers() == {ANN}
    assert {region for name, _, region in account.gate.signed if name == "s3"} == {"eu-west-1"}


def test_without_a_profile_the_environment_names_the_caller(account: Account) -> None:
    send_plan(account.plan(account.settings()), environ={})
    assert account.gate.keys("s3") == account.signers() == {OWN}


def test_each_user_calls_with_their_own_profile(account: Account, tmp_path: Path) -> None:
    """Check that the run records no profile, which belongs to one machine, but the settings that it needs."""
    send_plan(account.plan(account.settings(profile="ann")), environ={})
    account.keys(ben=BEN)
    account.gate.signed.clear()
    account.plane.wire.callers.clear()
    theirs = account.settings(profile="ben", role="arn:aws:iam::123456789012:role/of-another-project")
    run = open_run("r", store_url=account.store, settings=theirs)
    assert run.status().state == "pending"
    assert run.record["settings"]["role"] == account.role
    assert not {"profile", "role_to_assume"} & set(run.record["settings"])
    (row,) = list_page(account.store, theirs, limit=None).rows
    assert row["state"] == "pending"
    assert account.gate.keys("s3") == account.signers() == {BEN}


def test_a_saved_plan_is_sent_with_the_sender_s_profile(account: Account, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(account.plan(account.settings(profile="ann")).document()))
    assert "ann" not in json.loads(saved.read_text())["settings"].values()
    send_plan(load_plan(saved, settings=account.settings(profile="ben"), cwd=tmp_path), environ={})
    assert account.gate.keys("s3") == account.signers() == {BEN}


def test_a_role_is_assumed_for_both(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLIENT_TIMINGS, "provenance", 60.0)  # a loaded machine needs more time than the default
    run = send_plan(account.plan(account.settings(profile="ann", role_to_assume=ROLE)), environ={})
    assert run.status().state == "pending"
    assumed = account.gate.keys("sts") - {ANN}
    assert ANN in account.gate.keys("sts")
    assert assumed <= account.signers(), "the request for the caller's name must come from the role too"
    assert ":assumed-role/" in run.record["origin"]["principal"]
    for signers in (account.gate.keys("s3"), account.signers()):
        assert signers
        assert all(key.startswith("ASIA") for key in signers)


@pytest.mark.parametrize("old", ["expired", "deleted"])
def test_keys_that_are_replaced_in_a_long_wait_are_read_again_for_both(account: Account, old: str) -> None:
    run = send_plan(account.plan(account.settings(profile="ann")), environ={})
    for key in ("AKIASECOND0000000000", "AKIATHIRD00000000000"):
        if old == "expired":
            account.plane.wire.expired |= account.signers()
        for old_key in account.signers() if old == "deleted" else ():
            account.plane.wire.keys.pop(old_key, None)
        account.gate.expired |= account.gate.keys("s3")
        account.keys(ann=key)
        assert run.status().state == "pending"
        assert run.store.runs() == ["r"]
        assert key in account.signers()
        assert key in account.gate.keys("s3")
    account.gate.expired.add("AKIATHIRD00000000000")
    with pytest.raises(AuthError):
        run.store.runs()


def test_a_shell_is_opened_as_the_assumed_role(account: Account) -> None:
    plan = account.plan(account.settings(profile="ann", role_to_assume=ROLE), "r", interactive=True)
    way = plan.provider.shell(plan.request, "job", 0, [], tty=True)
    assert set(way.env) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
    assert way.env["AWS_ACCESS_KEY_ID"] != ANN


def test_an_assumed_role_that_expires_is_assumed_again_for_both(account: Account) -> None:
    run = send_plan(account.plan(account.settings(profile="ann", role_to_assume=ROLE)), environ={})
    first = account.gate.keys("s3"), account.signers()
    account.gate.expired |= first[0]
    account.plane.wire.expired |= first[1]
    assert run.status().state == "pending"
    assert run.store.runs() == ["r"]
    assert account.gate.keys("s3") - first[0]
    assert account.signers() - first[1]


def test_a_lasting_refusal_is_raised_after_one_more_try(account: Account) -> None:
    account.gate.expired.add(ANN)
    with pytest.raises(AuthError) as caught:
        send_plan(account.plan(account.settings(profile="ann")), environ={})
    assert caught.value.exit_code == 3
    assert account.plane.jobs == {}


# ------------------------------------------------------------------------------------------- a run's store and provider


def record_run(account: Account, provider: str, run_id: str) -> None:
    """Record a run of ``provider`` whose client died before it sent it."""
    made = account.settings(profile="ann").make_provider(provider)
    store = Store(account.store, storage=made.storage)
    job = Job.make(entry_point="train.py", image=f"{REGISTRY}/team/trainer:1", max_runtime="1h")
    layout = Layout(store=store.url, run_id=run_id, code_digest="c", runtime_digest="d")
    own = recorded_settings(type(made).Settings, dataclasses.asdict(made.settings))
    store.create_run(layout, {"run_id": run_id, "provider": provider, "settings": own, "job": job.to_dict()})


def test_settings_of_other_providers_do_not_open_a_local_run_s_store(account: Account) -> None:
    record_run(account, "local", "r")
    mixed = dataclasses.replace(account.settings(profile="ann"), provider="local")
    account.gate.signed.clear()
    open_run("r", store_url=account.store, settings=mixed).cancel()
    list_page(account.store, mixed, limit=None)
    reconcile(account.store, settings=mixed, cwd=account.folder, environ={})
    assert account.gate.keys("s3") == {OWN}


@pytest.mark.parametrize(("chosen", "key"), [("local", ANN), ("sagemaker", OWN)])
def test_a_run_s_own_provider_opens_its_store_whatever_the_chosen_one(account: Account, chosen: str, key: str) -> None:
    own = {"local": "sagemaker", "sagemaker": "local"}[chosen]
    record_run(account, own, "r")
    mixed = dataclasses.replace(account.settings(profile="ann"), provider=chosen)
    url = f"{account.store}/runs/r"
    run = open_run(url, store_url="./nosuch", settings=mixed)
    account.gate.signed.clear()
    assert run.status().state == "pending"
    assert account.gate.keys("s3") == {key}
    account.gate.signed.clear()
    ((_, listed),) = listed_runs(account.store, mixed)
    account.gate.signed.clear()
    assert isinstance(listed, Run)
    assert listed.status().state == "pending"
    assert account.gate.keys("s3") == {key}


def test_other_providers_are_tried_only_if_the_chosen_one_is_refused(account: Account) -> None:
    """Check `submit --provider sagemaker`, then `status` with no provider set."""
    record_run(account, "sagemaker", "r")
    mixed = dataclasses.replace(account.settings(profile="ann"), provider="local")
    account.gate.expired.add(OWN)
    assert open_run("r", store_url=account.store, settings=mixed).status().state == "pending"
    assert [row["state"] for row in list_page(account.store, mixed, limit=None).rows] == ["pending"]
    (row,) = reconcile(account.store, settings=mixed, cwd=account.folder, environ={})
    assert (row["state"], row["error"]) == ("pending", None)
    account.gate.expired.add(ANN)
    with pytest.raises(AuthError):
        open_run("r", store_url=account.store, settings=mixed)


def test_a_role_is_assumed_once_for_a_store_that_stays_open(account: Account) -> None:
    record_run(account, "sagemaker", "r")
    settings = account.settings(profile="ann", role_to_assume=ROLE)
    account.gate.signed.clear()
    run = open_run("r", store_url=account.store, settings=settings)
    assert run.store.runs() == ["r"]
    assert [service for service, _, _ in account.gate.signed].count("sts") == 1


def test_the_configuration_of_fsspec_stays(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"client_kwargs": {"endpoint_url": account.gate.url}})
    found = account.settings(profile="ann").make_provider().storage(account.store)
    assert found["client_kwargs"] == {"region_name": "eu-west-1"}
    assert Store(account.store, storage=lambda _: found).runs() == []
    assert account.gate.keys("s3") == {ANN}
