"""Submission to a cluster while clients are killed, and answers are lost or cut."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from trials import SEED, TRIALS
from worlds.kubernetes.world import KubernetesWorld, idle

from cloudtrain.errors import LostContactError
from cloudtrain.provider_api.protocol import Request
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.providers.kubernetes.request import LABEL_REQUEST

pytestmark = [pytest.mark.remote, pytest.mark.slow]

VALUES = {"TOKEN": "geheim"}
KINDS = {"job": ["jobs", "secrets", "services"], "jobset": ["jobsets", "secrets"]}
"""Objects of a run: a client looks for the first one, and creates each."""
CALLS = range(1, 7)
"""Numbers of a client's calls: 4 to submit, and at most 6 to complete another client's job."""
WAYS = (("kill", "before"), ("kill", "after"), ("lose", "before"), ("lose", "after"), ("cut", "after"))
"""Strikes: the client is killed, or it gets no answer, or half of one; before or after the server's work."""
CLIENT = """
import json, sys
from cloudtrain.provider_api.protocol import Request
from cloudtrain.provider_api.registry import find_provider
settings, request, values = json.loads(sys.stdin.read())
provider, request = find_provider("kubernetes")(**settings), Request(**request)
print(provider.find(request) or provider.submit(request, values))
"""


@dataclass(frozen=True)
class Strike:
    number: int
    how: str = ""
    when: str = ""


class Fire(http.server.ThreadingHTTPServer):
    """A proxy of one client to the cluster at ``port``. It forwards all calls but the one that ``strike`` names."""

    daemon_threads = True

    def __init__(self, port: int, strike: Strike) -> None:
        super().__init__(("127.0.0.1", 0), _Carrier)
        self.port, self.strike, self.calls, self.hit = port, strike, 0, False
        self.process: subprocess.Popen[str] | None = None
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def now(self) -> tuple[str, str]:
        """Return how and when this call is struck; empty if it is not."""
        self.calls += 1
        if self.calls != self.strike.number:
            return "", ""
        self.hit = True
        return self.strike.how, self.strike.when


class _Carrier(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fire

    def _carry(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        how, when = self.server.now()
        self.close_connection = True
        if when == "before":
            self._strike(how)
            return
        link = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        link.request(self.command, self.path, body or None, dict(self.headers))
        answer = link.getresponse()
        data = answer.read()
        link.close()
        if how in ("kill", "lose"):
            self._strike(how)
            return
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if how == "cut" else data)

    do_GET = do_POST = do_PATCH = _carry

    def _strike(self, how: str) -> None:
        if how == "kill":
            assert self.server.process is not None
            self.server.process.kill()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def world(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> Iterator[KubernetesWorld]:
    with idle(tmp_path_factory.mktemp("world"), monkeypatch, kind=kind) as found:
        yield found


def request_of(world: KubernetesWorld, trial: int = 0) -> Request:
    """Return the request of a two-node job with a secret: a Job, a Service and a Secret."""
    fields = {"instance_count": 2, "secrets": {"TOKEN": "env:TOKEN"}}
    made: Request = world.plan(fields, run_id=f"trial-{trial}").request
    return made


def send(world: KubernetesWorld, request: Request, strike: Strike) -> tuple[str, bool]:
    """Submit with a strike, and start the client again. Return the native id, and if the strike hit."""
    fire = Fire(world.plane.wire.server.server_address[1], strike)
    config = json.loads(world.plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{fire.server_port}"
    file = world.folder / f"kubeconfig-{fire.server_port}"
    file.write_text(json.dumps(config))
    settings = {**world.settings, "kubeconfig": str(file)}
    try:
        if strike.how == "kill":
            killed(fire, settings, request)
        provider = find_provider("kubernetes")(**settings)
        with contextlib.suppress(LostContactError):
            return provider.find(request) or provider.submit(request, VALUES), fire.hit
        return provider.find(request) or provider.submit(request, VALUES), fire.hit
    finally:
        fire.shutdown()
        fire.server_close()


def killed(fire: Fire, settings: dict[str, Any], request: Request) -> None:
    """Run a client in a process of its own, until it is killed or has submitted."""
    sent = json.dumps([settings, asdict(request), VALUES])
    piped = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    fire.process = subprocess.Popen([sys.executable, "-c", CLIENT], text=True, **piped)
    out, err = fire.process.communicate(sent, timeout=120)
    assert (fire.process.returncode, bool(out)) == ((-9, False) if fire.hit else (0, True)), err


def owned_kinds(world: KubernetesWorld, request: Request) -> list[str]:
    """Return the kinds of the run's objects. The first one owns the others, so it takes them along."""
    label = request.body["items"][0]["metadata"]["labels"][LABEL_REQUEST]
    jobs = [("jobs", job.made["metadata"]) for job in world.plane.jobs.values()]
    objects = [(kind, item["metadata"]) for (kind, *_), item in world.plane.objects.items() if "metadata" in item]
    found = {kind: meta for kind, meta in jobs + objects if meta.get("labels", {}).get(LABEL_REQUEST) == label}
    assert sum(meta.get("labels", {}).get(LABEL_REQUEST) == label for _, meta in jobs + objects) == len(found)
    uid = found.get("jobsets", found.get("jobs", {})).get("uid")
    assert {owner["uid"] for meta in found.values() for owner in meta.get("ownerReferences", ())} == {uid}
    return sorted(found)


@pytest.mark.parametrize(
    ("kind", "number", "how", "when"),
    [
        pytest.param(
            kind, number, *way, marks=[pytest.mark.proof] if way[0] == "kill" and (kind, number) != ("job", 2) else []
        )
        for kind, kinds in KINDS.items()
        for number in range(1, len(kinds) + 2)
        for way in WAYS
    ],
)
def test_a_client_that_is_struck_at_any_call_leaves_one_job(
    world: KubernetesWorld, kind: str, number: int, how: str, when: str
) -> None:
    request = request_of(world)
    native, hit = send(world, request, Strike(number, how, when))
    assert hit
    assert owned_kinds(world, request) == KINDS[kind]
    assert send(world, request, Strike(0)) == (native, False)


@pytest.mark.parametrize(
    ("kind", "trials"),
    [
        ("job", 2),
        *(pytest.param(kind, max(200, TRIALS // 5), marks=pytest.mark.proof) for kind in KINDS),
    ],
)
@pytest.mark.timeout(3600)
def test_clients_at_once_under_fire_leave_one_job(
    world: KubernetesWorld, kind: str, trials: int, record_property: Any
) -> None:
    """Check with three clients that submit one run, most of them with a strike."""
    chance = random.Random(f"kubernetes {SEED}")
    hits = dict.fromkeys(map("-".join, WAYS), 0)
    for trial in range(trials):
        request = request_of(world, trial)
        strikes = [Strike(chance.choice(CALLS), *chance.choice(WAYS)) for _ in range(3)]
        natives: list[str] = []

        def client(strike: Strike, request: Request = request, natives: list[str] = natives) -> None:
            native, hit = send(world, request, strike)
            natives.append(native)
            hits[f"{strike.how}-{strike.when}"] += hit

        threads = [threading.Thread(target=client, args=(strike,)) for strike in strikes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(natives), len(set(natives))) == (3, 1), (trial, strikes)
        assert owned_kinds(world, request) == KINDS[kind], (trial, strikes)
        assert world.provider.find(request) == natives[0]
        while len(world.plane.jobs) <= trial:
            assert world.provider.status(natives[0]).state == "pending"
            time.sleep(0.1)
        for job in world.plane.jobs.values():
            job.stop()
    assert len(world.plane.jobs) == trials
    record_property("note", f"strikes that hit: {', '.join(f'{hits[name]} {name}' for name in hits)}")
