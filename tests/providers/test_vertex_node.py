"""Provider ``vertex`` on the node: topology, steps before the runtime, secrets. No test here needs an SDK."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

from cloudtrain.engine.processes import free_port_pair
from cloudtrain.errors import SpecError, StorageError
from cloudtrain.job.bundle import build_bundle
from cloudtrain.job.job import Job, Source
from cloudtrain.provider_api.node import PROTOCOL, NodeEnvironment, Topology
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.providers.vertex import Provider, bootstrap, node, prepare
from cloudtrain.providers.vertex.node import secret, token
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.store import runtime_zip
from cloudtrain.validate import TEST_TIMINGS

HOSTS = [f"cmle-training-workerpool{pool}-ab-{i}:2222" for pool, i in ((0, 0), (1, 0), (1, 1))]


def spec(kind: str, index: int, **more: Any) -> str:
    cluster = {"workerpool0": HOSTS[:1], "workerpool1": HOSTS[1:]}
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": {"type": kind, "index": index}, **more})


def topology(nodes: int, text: str | None, **environ: str) -> Topology:
    environ_spec = {} if text is None else {"CLUSTER_SPEC": text}
    return Provider.node_environment({"CLOUDTRAIN_NODES": str(nodes), **environ_spec, **environ}, {}).topology


# ------------------------------------------------------------------------------------------------------------- topology


@pytest.mark.parametrize(
    ("kind", "index", "rank"), [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 1, 2)]
)
def test_ranks_go_through_the_pools(kind: str, index: int, rank: int) -> None:
    poisoned = {"RANK": "7", "WORLD_SIZE": "2", "MASTER_ADDR": "bogus", "MASTER_PORT": "1"}
    found = topology(3, spec(kind, index), **poisoned)
    assert found == Topology(nodes=3, node_rank=rank, master_addr="cmle-training-workerpool0-ab-0", master_port=2222)


@pytest.mark.parametrize(("port", "link"), [("2222", 3333), ("3333", 2222)])
def test_the_link_has_a_port_that_the_chief_s_name_forwards(port: str, link: int) -> None:
    text = spec("workerpool1", 0).replace(":2222", f":{port}")
    site = Provider.node_environment({"CLOUDTRAIN_NODES": "3", "CLUSTER_SPEC": text}, {})
    assert (site.topology.master_port, site.link_port) == (int(port), link)
    assert topology(3, text.replace(f":{port}", ":65535")).master_port == 2222, "the next port would be none"
    assert site.join_timeout >= 3600
    assert site.restarts_in_place


def test_the_other_shape_of_the_cluster() -> None:
    pools = [{"replicas": HOSTS[:1]}, {"replicas": HOSTS[1:]}]
    task = {"type": "workerpool1", "index": 1}
    for shape in ({"cluster": {"worker_pools": pools}}, {"worker_pools": pools}):
        assert topology(3, json.dumps({**shape, "task": task})).node_rank == 2


@pytest.mark.parametrize(("pool", "index", "rank"), [(0, 0, 0), (1, 0, 1), (1, 1, 2)])
def test_the_shape_that_numbers_its_pools(pool: int, index: int, rank: int) -> None:
    """Check the shape of python-aiplatform's tests/unit/aiplatform/test_training_utils.py: the numbers count, not the
    order."""
    pools = [{"index": 1, "replicas": HOSTS[1:]}, {"index": 0, "replicas": HOSTS[:1]}]
    task = {"worker_pool_index": pool, "replica_index": index, "trial": "TRIAL_ID"}
    found = topology(3, json.dumps({"cluster": {"worker_pools": pools}, "environment": "cloud", "task": task}))
    assert found == Topology(nodes=3, node_rank=rank, master_addr="cmle-training-workerpool0-ab-0", master_port=2222)


def test_servers_next_to_the_nodes_are_no_nodes() -> None:
    cluster = {"workerpool0": HOSTS[:1], "workerpool1": HOSTS[1:2], "workerpool2": HOSTS[2:]}
    text = json.dumps({"cluster": cluster, "task": {"type": "workerpool1", "index": 0}})
    assert topology(2, text).node_rank == 1


def test_one_node_needs_no_variables() -> None:
    alone = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=2222)
    assert topology(1, None) == topology(1, spec("workerpool0", 0)) == alone
    assert topology(1, "{") == topology(1, "[]") == alone, "one node must not read the text"


@for_each(
    ("text", "says"),
    [
        (None, "this node of 3 does not know its number"),
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("{}", "has no task"),
        (spec("workerpool1", 2), "lists 3 nodes and workerpool1 2; the job has 3"),
        (spec("workerpool2", 0), "lists 3 nodes and workerpool2 0; the job has 3"),
        (spec("workerpool1", 0, task=None), "has no task"),
        (spec("workerpool1", 0, task=["workerpool1", 0]), "has no task"),
        (spec("workerpool1", 0, task={"type": "workerpool1", "index": "first"}), "has a task without a number"),
        (
            spec("workerpool1", 0, task={"type": "workerpool1", "index": -1}),
            "lists 3 nodes and workerpool1 -1; the job has 3",
        ),
        (spec("workerpool1", 0, task={"index": 0}), "lists 3 nodes and workerpoolNone 0; the job has 3"),
        (spec("workerpool0", 0).replace("-ab-1", ""), "lists 3 nodes and workerpool0 0; the job has 4"),
    ],
)
def test_a_node_without_its_number_is_refused(text: str | None, says: str) -> None:
    """Check this because two nodes that both act as the first would wait for each other. The error never shows the
    text."""
    with pytest.raises(SpecError) as caught:
        topology(4 if "job has 4" in says else 3, text)
    assert str(caught.value) == f"CLUSTER_SPEC: {says}"


def test_the_environment_in_the_spec_is_never_shown() -> None:
    with pytest.raises(SpecError) as caught:
        topology(5, spec("workerpool1", 0, job={"env": "s3cret"}))
    assert "s3cret" not in str(caught.value)


def test_paths_and_exit_codes() -> None:
    argv = {"live": "/l", "code": "/c/code.tar.gz", "input.a": "/a", "file.b-1": "/b/x y.csv", "copy.c": "/c",
            "copyfile.d": "/d/z.csv"}  # fmt: skip
    site = Provider.node_environment({}, argv)
    assert site.paths == {"live": "/l", "code": "/c/code.tar.gz", "input.a": "/a", "input.b-1": "/b", "input.c": "/c",
                          "input.d": "/d"}  # fmt: skip
    assert site.exit_code == {"succeeded": 0, "failed": 1, "preempted": 134, "lost": 134}
    assert int(site.export_env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < site.stop_grace
    assert Provider.node_environment({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, {}).export_env == {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"
    }


def test_a_spot_node_has_less_time() -> None:
    assert Provider.node_environment({}, {"live": "/l"}).stop_grace == 30
    spot = Provider.node_environment({}, {"live": "/l", "grace": "15"})
    assert (spot.stop_grace, spot.paths) == (15, {"live": "/l"})
    assert int(spot.export_env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 15


# ----------------------------------------------------------------------------------------------------------- GPUDirect

RDMA = """
export NCCL_NET=gIB NCCL_IB_TC=52
export LD_LIBRARY_PATH="/usr/local/gib/lib64:${LD_LIBRARY_PATH}"
export NCCL_DEBUG=WARN
echo "it says something"
[ -n "$NOTHING" ] && export NOTHING
"""
TCPXO = 'export NCCL_TUNER_CONFIG_PATH="${NCCL_LIB_DIR}/a3plus_tuner_config.textproto" NCCL_FASTRAK_USE_LLCM=1\n'


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return the machine's paths for its scripts; neither exists yet."""
    found = {name: tmp_path / f"{name}.sh" for name in node.SCRIPTS}
    monkeypatch.setattr(node, "SCRIPTS", {name: str(path) for name, path in found.items()})
    return found


def site_of_two(transport: str = "GPUDirect-RDMA", **environ: str) -> NodeEnvironment:
    """Return the environment of one of two nodes, by a plan for machines with that transport."""
    given = {"CLOUDTRAIN_NODES": "2", "CLUSTER_SPEC": spec("workerpool0", 0).replace(f', "{HOSTS[2]}"', "")}
    paths = {"fabric": transport} if transport else {}
    return Provider.node_environment({"PATH": os.environ["PATH"], **given, **environ}, paths)


@pytest.mark.parametrize("bash", [True, False])
def test_ranks_get_the_variables_of_the_script_for_rdma(
    scripts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, bash: bool
) -> None:
    """Check that values of the image or an option stay, unless the script has extended them."""
    if not bash:
        monkeypatch.setattr(node.shutil, "which", lambda name: None)
    scripts["GPUDirect-RDMA"].write_text(RDMA)
    site = site_of_two(LD_LIBRARY_PATH="/usr/local/cuda/lib64", NCCL_DEBUG="INFO")
    assert {name: site.export_env[name] for name in site.export_env if not name.startswith("TORCH_")} == {
        "NCCL_NET": "gIB",
        "NCCL_IB_TC": "52",
        "LD_LIBRARY_PATH": "/usr/local/gib/lib64:/usr/local/cuda/lib64",
    }
    [note] = site.notes
    assert note.startswith(
        f"GPUDirect-RDMA: sourced {scripts['GPUDirect-RDMA']}, which sets LD_LIBRARY_PATH, NCCL_IB_TC"
    )
    assert note.endswith("; NCCL_DEBUG stays as it was set before")


def test_the_script_for_tcpxo_gets_the_folder_of_its_plug_in(scripts: dict[str, Path]) -> None:
    scripts["GPUDirect-TCPXO"].write_text(TCPXO)
    site = site_of_two("GPUDirect-TCPXO")
    folder = scripts["GPUDirect-TCPXO"].parent
    assert site.export_env["NCCL_TUNER_CONFIG_PATH"] == f"{folder}/a3plus_tuner_config.textproto"
    assert site.export_env["NCCL_LIB_DIR"] == str(folder)
    assert site.export_env["LD_LIBRARY_PATH"] == str(folder), "the folder of the plug-in must be on the path"


def test_the_folder_of_the_plug_in_is_found_without_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, folder = tmp_path / "gib/scripts/set_nccl_env.sh", tmp_path / "gib/lib64"
    for path in (script.parent, folder):
        path.mkdir(parents=True)
    script.write_text("export NCCL_NET=gIB\n")
    monkeypatch.setattr(node, "SCRIPTS", {"GPUDirect-RDMA": str(script)})
    found = site_of_two(LD_LIBRARY_PATH="/usr/local/cuda/lib64").export_env
    assert (found["NCCL_NET"], found["LD_LIBRARY_PATH"]) == ("gIB", f"{folder}:/usr/local/cuda/lib64")


def test_a_value_that_is_part_of_the_script_s_stays(scripts: dict[str, Path]) -> None:
    scripts["GPUDirect-RDMA"].write_text(RDMA)
    site = site_of_two(NCCL_IB_TC="5")
    assert "NCCL_IB_TC" not in site.export_env
    assert "NCCL_IB_TC stays as it was set before" in site.notes[0]
    scripts["GPUDirect-RDMA"].write_text("export NCCL_NET=gIB\n")
    sourced = f"GPUDirect-RDMA: sourced {scripts['GPUDirect-RDMA']}"
    kept = "which sets nothing new; NCCL_NET stays as it was set before"
    assert site_of_two(NCCL_NET="Socket").notes == [f"{sourced}, {kept}"]


def test_only_a_machine_without_its_script_warns(scripts: dict[str, Path]) -> None:
    site = site_of_two()
    assert set(site.export_env) == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    assert "so NCCL may use TCP, which is slower" in site.notes[0]
    scripts["GPUDirect-RDMA"].write_text(RDMA)
    assert site_of_two("").notes == [], "an image may have the script on a machine without such a network"


def test_one_node_needs_no_fabric(scripts: dict[str, Path]) -> None:
    scripts["GPUDirect-RDMA"].write_text(RDMA)
    site = Provider.node_environment({}, {})
    assert (site.notes, set(site.export_env)) == ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo 'no such NIC' >&2; exit 3", "no such NIC"),
        ("export X=1; exit 0", "the shell ended with 0"),
        ("if then", "line 1: `if then"),
        ("sleep 30", "timed out"),
    ],
)
def test_a_failing_script_is_a_warning_and_training_continues(
    scripts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setattr(node, "TIMEOUT", 1.0)
    scripts["GPUDirect-RDMA"].write_text(text)
    site = site_of_two()
    assert set(site.export_env) == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    [note] = site.notes
    assert "cannot be sourced, so NCCL may use TCP, which is slower: " in note
    assert says in note


# --------------------------------------------------------------------------------------------------- services of a node


NO_HTTP, CUT = -1, -2
"""Stand-ins for a status: an answer that is not HTTP, and one that breaks off."""


class Service(http.server.BaseHTTPRequestHandler):
    """Servers on loopback of one node: metadata, Secret Manager and Cloud Storage."""

    answers: list[tuple[int, Any]]
    tokens: list[tuple[int, Any]]
    requests: list[tuple[str, Mapping[str, str]]]

    def do_GET(self) -> None:
        self.requests.append((self.path, dict(self.headers)))
        waiting = self.tokens if "computeMetadata" in self.path else self.answers
        status, answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if status == NO_HTTP:
            self.wfile.write(b"what\r\n\r\n")
            return
        self.send_response(200 if status == CUT else status)
        self.send_header("Content-Length", str(len(data) + (status == CUT)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(TIMINGS, "http_pauses", (0.0, 0.0))
    monkeypatch.setattr(bootstrap, "PAUSES", (0.0, 0.0))
    value = {"payload": {"data": base64.b64encode("s3cret ü".encode()).decode()}}
    given = {"answers": [(200, value)], "tokens": [(200, {"access_token": "TK", "expires_in": 3599})], "requests": []}
    handler: Any = type("Handler", (Service,), given)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    here = f"127.0.0.1:{server.server_port}"
    handler.environ = {
        "GCE_METADATA_HOST": here,
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER": f"http://{here}/",
        "STORAGE_EMULATOR_HOST": f"http://{here}",
    }
    for name, text in handler.environ.items():
        monkeypatch.setenv(name, text)
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_secret_is_read_as_the_jobs_service_account(service: Any) -> None:
    assert secret("projects/p/secrets/s", service.environ) == "s3cret ü"
    (token_path, metadata), (path, headers) = service.requests
    assert token_path == "/computeMetadata/v1/instance/service-accounts/default/token"
    assert metadata["Metadata-Flavor"] == "Google"
    assert path == "/v1/projects/p/secrets/s/versions/latest:access"
    assert headers["Authorization"] == "Bearer TK"
    secret("projects/p/secrets/s/versions/3", service.environ)
    assert service.requests[-1][0] == "/v1/projects/p/secrets/s/versions/3:access"
    override = "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER"
    secret("projects/p/secrets/s", {**service.environ, override: f"{service.environ[override]}X/"})
    assert service.requests[-1][0] == "/X/v1/projects/p/secrets/s/versions/latest:access"
    site = Provider.node_environment(service.environ, {})
    assert site.secrets is not None
    assert site.secrets("gcp:projects/p/secrets/s") == "s3cret ü"


def test_passing_faults_are_retried(service: Any) -> None:
    service.answers = [(429, {"error": {"message": "slow"}}), (503, b"<html>"), *service.answers]
    assert secret("projects/p/secrets/s", service.environ) == "s3cret ü"
    service.answers = [(429, {"error": {"message": "slow"}})]
    service.requests.clear()
    with pytest.raises(StorageError, match=r"was refused \(429\): slow"):
        secret("projects/p/secrets/s", service.environ)
    assert len(service.requests) == 4, "one token, three tries"


@pytest.mark.parametrize("broken", [(NO_HTTP, b""), (CUT, b"{}")])
def test_an_answer_that_breaks_off_is_tried_again(service: Any, tmp_path: Path, broken: tuple[int, bytes]) -> None:
    service.answers, service.tokens = [broken, *service.answers], [broken, *service.tokens]
    assert secret("projects/p/secrets/s", service.environ) == "s3cret ü"
    service.answers, service.tokens = [broken, (200, b"fetched")], [broken, *service.tokens]
    assert bootstrap.read("gs://b/o", root=str(tmp_path), patience=0) == b"fetched"
    service.answers = [broken]
    with pytest.raises(StorageError, match="does not answer"):
        secret("projects/p/secrets/s", service.environ)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((403, {"error": {"message": "not you"}}), "not you; give the job's service account the role Secret Manager"),
        ((404, b""), r"\(404\): no reason"),
        ((200, {}), "without text"),
        ((200, [1]), "without text"),
        ((200, {"payload": {"data": base64.b64encode(b"\xff\xfe").decode()}}), "without text"),
    ],
)
def test_a_refusal_is_raised_at_once(service: Any, answer: tuple[int, Any], says: str) -> None:
    service.answers = [answer]
    with pytest.raises(StorageError, match=says):
        secret("projects/p/secrets/s", service.environ)
    assert len(service.requests) == 2


def test_no_token_no_secret(service: Any) -> None:
    service.tokens = [(404, b"")]
    with pytest.raises(StorageError, match=r"set vertex\.service_account"):
        secret("projects/p/secrets/s", service.environ)
    service.tokens = [(200, {})]
    with pytest.raises(StorageError, match="without a token"):
        token(service.environ)
    assert all("computeMetadata" in path for path, _ in service.requests)


# --------------------------------------------------------------------------------------------------- before the runtime


def test_the_mounted_bucket_comes_first(service: Any, tmp_path: Path) -> None:
    (tmp_path / "b" / "x").mkdir(parents=True)
    (tmp_path / "b" / "x" / "o").write_bytes(b"mounted")
    assert bootstrap.read("gs://b/x/o", root=str(tmp_path), patience=0) == b"mounted"
    assert service.requests == []


def test_without_a_mount_the_api_gives_the_file(service: Any, tmp_path: Path) -> None:
    service.answers = [(503, b""), (200, b"fetched")]
    assert bootstrap.read("gs://b/x y/o", root=str(tmp_path), patience=0) == b"fetched"
    path, headers = service.requests[-1]
    assert urllib.parse.unquote(path) == "/storage/v1/b/b/o/x y/o?alt=media"
    assert "%2F" in path
    assert headers["Authorization"] == "Bearer TK"
    service.answers = [(403, b"")]
    with pytest.raises(OSError, match="403"):
        bootstrap.read("gs://b/o", root=str(tmp_path), patience=0)


def test_a_mount_that_comes_late_is_waited_for(service: Any, tmp_path: Path) -> None:
    def appear() -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "o").write_bytes(b"late")

    threading.Timer(0.3, appear).start()
    assert bootstrap.read("gs://b/o", root=str(tmp_path), patience=30) == b"late"
    assert service.requests == []


@pytest.mark.costly
def test_the_digest_is_that_of_the_client(tmp_path: Path) -> None:
    archive = tmp_path / "cloudtrain.pyz"
    archive.write_bytes(runtime_zip.build())
    assert bootstrap.digest(str(archive)) == runtime_zip.digest()


def test_a_damaged_byte_of_compiled_code_is_found_too(tmp_path: Path) -> None:
    archive = tmp_path / "cloudtrain.pyz"
    archive.write_bytes(runtime_zip.build())
    with zipfile.ZipFile(archive) as opened:
        member = opened.getinfo("cloudtrain/errors.pyc")
    data = bytearray(archive.read_bytes())
    data[member.header_offset + 30 + len(member.filename) + member.compress_size // 2] ^= 1
    archive.write_bytes(data)
    with pytest.raises((zipfile.BadZipFile, zlib.error)):
        bootstrap.digest(str(archive))


def start_bootstrap(
    tmp_path: Path, archive: bytes, *, folder: str, service: Any, arguments: list[str], patience: float = 0.0
) -> Any:
    """Start the bootstrap's text as a container does, next to broken modules of the image."""
    for name in ("queue", "tempfile", "json", "signal"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('of the image')")
    service.answers = [(200, archive)]
    text = Path(bootstrap.__file__).read_text().replace("PATIENCE = 30.0", f"PATIENCE = {patience}")
    text = text.replace("PAUSES = (0.5, 2.0, 5.0)", "PAUSES = (0.0, 0.0)")
    words = [sys.executable, "-S", "-c", text, f"gs://no-bucket/runtime/{folder}/cloudtrain.pyz", *arguments]
    return subprocess.Popen(
        words, env={**service.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )


@pytest.mark.costly
def test_it_continues_in_the_verified_runtime(service: Any, tmp_path: Path) -> None:
    context = tmp_path / "container" / "context.json"
    context.parent.mkdir()
    context.write_text('{"protocol": 99}')
    arguments = ["run", "--context", str(context), "--attempt", "0", "--path", "live=/nowhere"]
    process = start_bootstrap(
        tmp_path, runtime_zip.build(), folder=runtime_zip.digest(), service=service, arguments=arguments
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "cloudtrain: this node cannot start: context: context of protocol 99, this is 1"


def test_a_damaged_runtime_is_not_started(service: Any, tmp_path: Path) -> None:
    process = start_bootstrap(
        tmp_path, runtime_zip.build(), folder=hashlib.sha256().hexdigest(), service=service, arguments=["run"]
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 134
    assert "its digest is wrong" in err
    assert err.count("\n") == 1


@pytest.mark.costly
def test_a_node_that_cannot_start_lets_vertex_try_again(service: Any, tmp_path: Path) -> None:
    """Check a late metadata server, then an unreadable input."""
    assert bootstrap.AGAIN == node.AGAIN
    service.tokens = [(503, b"")]
    process = start_bootstrap(tmp_path, b"", folder="x", service=service, arguments=["run"])
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n")) == (134, 1)
    assert "this node cannot start: gs://no-bucket/runtime/x/cloudtrain.pyz: HTTP Error 503" in err
    (tmp_path / "context.json").touch()
    arguments = ["run", "--context", str(tmp_path / "context.json"), "--path", f"copy.x={tmp_path}/nowhere"]
    code, _, err = run_prepare(tmp_path, "", arguments)
    assert (code, err.count("\n")) == (134, 1)
    why = f"cannot copy the input x from {tmp_path}/nowhere: No such file or directory"
    assert err == f"cloudtrain: this node cannot start: {why}\n"


def run_prepare(tmp_path: Path, text: str, arguments: list[str]) -> tuple[int, str, str]:
    """Run the step after the bootstrap, which continues in a file with ``text``. Return its exit code and output."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "next.py").write_text(text)
    code = f"from cloudtrain.providers.vertex import prepare\nprepare.main('next.py', {arguments!r})"
    environ = {**os.environ, "PYTHONPATH": str(Path(runtime_zip.__file__).parent.parent)}
    words = [sys.executable, "-c", code]
    process = subprocess.run(words, cwd=tmp_path / "alone", env=environ, capture_output=True, text=True, timeout=60)
    return process.returncode, process.stdout, process.stderr


UNHEARD = """
import os, signal, sys
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
from cloudtrain.runtime import __main__ as runtime
class Node:
    def __init__(self, *, inbox, **given):
        self.inbox = inbox
    def run(self):
        return self.inbox.get(timeout=20)[1]["number"]
runtime.Node = Node
runtime.leave(sys.argv[1:])
"""


@pytest.mark.costly
def test_a_stop_while_the_runtime_loads_is_handled(tmp_path: Path) -> None:
    """Check that its own handler gets it: PID 1 would lose it, and any other process would die."""
    (tmp_path / "context.json").write_text(json.dumps({"protocol": PROTOCOL, "provider": "vertex"}))
    (tmp_path / "key").touch()
    arguments = ["run", "--context", str(tmp_path / "context.json"), "--path", "live=/nowhere"]
    assert run_prepare(tmp_path, UNHEARD, arguments)[:2] == (signal.SIGTERM, "alive\n")


def test_a_stop_before_the_first_download_lets_vertex_try_again(service: Any, tmp_path: Path) -> None:
    """Stop it while it waits for the mount."""
    process = start_bootstrap(tmp_path, b"", folder="x", service=service, arguments=["run"], patience=60.0)
    deadline = time.monotonic() + 30
    while not _handled_signals(process.pid) & 1 << signal.SIGTERM - 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=30) == 134
    assert service.requests == []
    process.stderr.close()


def test_a_stop_before_the_runtime_lets_vertex_try_again(service: Any, tmp_path: Path) -> None:
    """Stop it while it waits for a bucket that never shows the client's files."""
    arguments = ["run", "--context", str(tmp_path / "never"), "--attempt", "0"]
    process = start_bootstrap(
        tmp_path, runtime_zip.build(), folder=runtime_zip.digest(), service=service, arguments=arguments
    )
    deadline = time.monotonic() + 60
    while not (handlers := _handled_signals(process.pid)) & 1 << signal.SIGTERM - 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert handlers & 1 << signal.SIGTERM - 1
    process.terminate()
    assert process.wait(timeout=30) == 134
    process.stderr.close()


def _handled_signals(pid: int) -> int:
    """Return the signals that a process handles, as a mask."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)


def test_a_bucket_that_does_not_appear_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gs://gcs at .*\nhint: make the bucket in the job's region"):
        prepare.await_file("gcs/runs/r/context.json", patience=0)


def test_code_that_the_mount_lacks_comes_by_the_api(service: Any, tmp_path: Path) -> None:
    root, key = f"{tmp_path}/gcs", "bucket/code/d1/code.tar.gz"
    service.answers = [(200, b"fetched")]
    name, _, path = prepare.delivered(f"code={root}/{key}", root=root, patience=0).partition("=")
    assert (name, Path(path).name, Path(path).read_bytes()) == ("code", "code.tar.gz", b"fetched")
    assert (
        urllib.parse.unquote(service.requests[-1][0])
        == f"/storage/v1/b/bucket/o/{key.removeprefix('bucket/')}?alt=media"
    )
    there = tmp_path / "gcs" / key
    there.parent.mkdir(parents=True)
    there.write_bytes(b"mounted")
    assert prepare.delivered(f"code={there}", root=root) == f"code={there}"
    assert prepare.delivered(f"live={root}/live", root=root) == f"live={root}/live"


def test_inputs_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    source = tmp_path / "gcs" / "data"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "a b.csv").write_text("a")
    (source / "sub" / "c").write_text("c")
    assert prepare.copied("live=/x") == "live=/x"
    name, _, folder = prepare.copied(f"copy.train={source}").partition("=")
    assert name == "input.train"
    assert {str(p.relative_to(folder)) for p in Path(folder).rglob("*")} == {"a b.csv", "sub", "sub/c", "sub/empty"}
    name, _, folder = prepare.copied(f"copyfile.one={source}/a b.csv").partition("=")
    assert (name, os.listdir(folder)) == ("input.one", ["a b.csv"])
    for missing in ("copy.x", "copyfile.x"):
        with pytest.raises(StorageError, match="the input x from gs://no-bucket/data: No such file or directory"):
            prepare.copied(f"{missing}={prepare.GCS}/no-bucket/data")


def test_little_shared_memory_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(prepare, "SHM_MIB", 1 << 40)
    prepare.check_shm(str(tmp_path))
    assert "num_workers=0" in capsys.readouterr().err
    monkeypatch.setattr(prepare, "SHM_MIB", 0)
    prepare.check_shm(str(tmp_path))
    prepare.check_shm(str(tmp_path / "nowhere"))
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------------ ends of a job's nodes

HOLD = """
import os, sys, time
parent, go = os.getppid(), sys.argv[1]
print("holding", flush=True)
rank = os.environ["RANK"]
while os.getppid() == parent and (not os.path.exists(go) or open(go).read() not in ("", rank)):
    time.sleep(0.05)
if os.path.exists(go) and open(go).read() == rank:
    raise ConnectionError("Connection closed by peer")
if rank == "1":
    raise ValueError("one rank fails")
"""


def stage(tmp_path: Path, script: str, **fields: Any) -> None:
    """Write the files of a job's nodes: its context, code and runtime."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(script)
    source = Source(path=str(tmp_path / "src"), entry_point="train.py")
    bundle = build_bundle(source, cwd=tmp_path, max_bytes=1 << 20)
    (tmp_path / "code.tar.gz").write_bytes(bundle.archive())
    (tmp_path / "cloudtrain.pyz").write_bytes(runtime_zip.build())
    job = Job.make(entry_point="train.py", launcher="python", image="team/trainer:1", **fields)
    layout = Layout(
        store="gs://bucket/store", run_id="r", code_digest=bundle.digest, runtime_digest=runtime_zip.digest()
    )
    made = Provider(project="p", location="europe-west4", service_account="t@p.iam.gserviceaccount.com")
    context = made.plan(job, layout).context
    (tmp_path / "context.json").write_text(json.dumps(context))
    (tmp_path / "key").write_bytes(b"k" * 32)


SHOW = """
import json, os
print("environment", json.dumps(dict(os.environ)), flush=True)
"""


@pytest.mark.slow
def test_a_script_does_not_detect_kubeflow(tmp_path: Path, service: Any) -> None:
    """Check by the rule of Lightning 1.9 (`KubeflowEnvironment.detect`), which 2.0 and later lack. The job's own
    variables stay, and secrets still come by the metadata server."""
    stage(tmp_path, SHOW, env={"KUBERNETES_MINE": "1"}, secrets={"TOKEN": "gcp:projects/p/secrets/s"})
    words = [sys.executable, str(tmp_path / "cloudtrain.pyz"), "run", "--context", str(tmp_path / "context.json")]
    words += ["--path", f"live={tmp_path / 'live'}", "--path", f"code={tmp_path / 'code.tar.gz'}"]
    pod = {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    environ = {**os.environ, **service.environ, **pod}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if "] environment {" in line]
    script_view = json.loads(line.partition("environment ")[2])
    assert {name for name in script_view if name.startswith("KUBERNETES_")} == {"KUBERNETES_MINE"}
    assert not {"KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"} <= script_view.keys()
    assert script_view["TOKEN"] == "***TOKEN***", "the value must be present, and hidden in the log"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Start three nodes of one job as local processes, with further arguments, and wait until each script holds."""
    stage(tmp_path, HOLD, instance_count=3, args=[str(tmp_path / "go")])
    addresses = [f"127.0.0.1:{free_port_pair()}", "127.0.0.1:1", "127.0.0.1:1"]
    cluster = {"workerpool0": addresses[:1], "workerpool1": addresses[1:]}
    start_bootstrap: list[subprocess.Popen[str]] = []

    def start(*more: str) -> list[subprocess.Popen[str]]:
        for pool, index in (("workerpool0", 0), ("workerpool1", 0), ("workerpool1", 1)):
            spec = json.dumps({"cluster": cluster, "task": {"type": pool, "index": index}})
            words = [
                sys.executable,
                str(tmp_path / "cloudtrain.pyz"),
                "run",
                "--context",
                str(tmp_path / "context.json"),
            ]
            words += ["--path", f"live={tmp_path / 'live'}", "--path", f"code={tmp_path / 'code.tar.gz'}", *more]
            environ = {**os.environ, "CLOUDTRAIN_NODES": "3", "CLUSTER_SPEC": spec}
            start_bootstrap.append(
                subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        for process in start_bootstrap:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "holding" in line:
                    break
            assert "holding" in lines[-1], lines
        return start_bootstrap

    yield start
    for process in start_bootstrap:
        process.kill()
        process.communicate()


def codes(nodes: list[subprocess.Popen[str]]) -> list[int]:
    for process in nodes:
        process.communicate(timeout=60)
    return [process.returncode for process in nodes]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_nodes_that_only_lost_a_peer_let_vertex_start_the_job_again(three: Any, victim: int) -> None:
    """Check all nodes, also one that node 0 only stops: an exit code 1 of any would end the job for good."""
    nodes = three()
    nodes[victim].kill()
    expected = [134, 134, 134]
    expected[victim] = -signal.SIGKILL
    assert codes(nodes) == expected


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_node_is_lost_before_the_link_reports_it(
    three: Any, tmp_path: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check this because a rank reports the cut connection at once, and the link knows its end a minute and a half
    later."""
    silence = 6.0 if silent == 0 else 90.0
    monkeypatch.setenv(TEST_TIMINGS, f"node.silence={silence},node.ping=1,node.peers=2")
    nodes = three()
    nodes[silent].send_signal(signal.SIGSTOP)
    (tmp_path / "said").write_text("1" if silent == 0 else "0")
    (tmp_path / "said").rename(tmp_path / "go")
    assert codes([node for node in nodes if node is not nodes[silent]]) == [134, 134]


@pytest.mark.slow
def test_a_failure_of_the_script_is_final(three: Any, tmp_path: Path) -> None:
    """Check also nodes that only stop because of it: Vertex may read any code first."""
    nodes = three()
    (tmp_path / "go").touch()
    assert codes(nodes) == [1, 1, 1]


@pytest.mark.slow
def test_stopped_nodes_let_vertex_start_the_job_again(three: Any) -> None:
    nodes = three("--path", "grace=4")  # as spot machines have grace=15; each script uses three quarters of it
    nodes[1].terminate()
    assert codes(nodes) == [134, 134, 134]
