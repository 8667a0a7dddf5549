"""Provider ``azureml`` on the node: its reading of the job's variables, and secrets through the job's identity
alone."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

from cloudtrain.errors import SpecError, StorageError
from cloudtrain.provider_api.node import Topology
from cloudtrain.providers.azureml import Provider, node
from cloudtrain.providers.azureml.node import place, secret, token
from cloudtrain.runtime.timings import TIMINGS

FOUR = {"CLOUDTRAIN_NODES": "4"}


def topology(**environ: str) -> Topology:
    return Provider.node_environment(environ, {}).topology


# ------------------------------------------------------------------------------------------------------------- topology


@for_each(
    ("environ", "rank", "address"),
    [
        ({"NODE_RANK": "3", "MASTER_ADDR": "10.0.0.4", "RANK": "24", "WORLD_SIZE": "32"}, 3, "10.0.0.4"),
        ({"AZUREML_CR_NODE_RANK": "2", "AZ_BATCHAI_JOB_MASTER_NODE_IP": "10.0.0.4"}, 2, "10.0.0.4"),
        ({"AZUREML_CR_NODE_RANK": "1", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, 1, "10.0.0.4"),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.4"}, 3, "10.0.0.4"),
        ({"NODE_RANK": "", "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0"}, 1, "node-0"),
        ({"NODE_RANK": "0", "MASTER_ADDR": "node-0", "OMPI_COMM_WORLD_NODE_RANK": "7"}, 0, "node-0"),
    ],
)
def test_the_topology_from_any_known_variables(environ: dict[str, str], rank: int, address: str) -> None:
    found = topology(**FOUR, **environ)
    assert (found.nodes, found.node_rank, found.master_addr) == (4, rank, address)


@for_each(
    "environ",
    [
        {"MASTER_ADDR": "10.0.0.4"},
        {"NODE_RANK": "1"},
        {"RANK": "1", "WORLD_SIZE": "32", "MASTER_ADDR": "10.0.0.4"},  # of a process, not of a node
        {"OMPI_COMM_WORLD_NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4"},
    ],
)
def test_a_node_without_its_number_is_refused(environ: dict[str, str]) -> None:
    """Check this because two nodes that both act as the first would wait for each other."""
    with pytest.raises(SpecError, match="is not set"):
        topology(**FOUR, **environ)


def test_one_node_needs_no_variables() -> None:
    assert topology() == Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=29500)
    alone = topology(CLOUDTRAIN_NODES="1", MASTER_ADDR="10.0.0.4", NODE_RANK="0", MASTER_PORT="6105")
    assert alone == Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=6105)


@for_each(("given", "port"), [("6105", 6105), ("", 29500), ("65535", 29500), ("x", 29500)])
def test_the_port_leaves_room_for_the_node_link(given: str, port: int) -> None:
    assert topology(MASTER_PORT=given).master_port == port


def test_paths_are_those_of_the_command_line() -> None:
    site = Provider.node_environment(
        {}, {"live": "/l", "code": "/c/code.tar.gz", "input.a": "/a", "file.b-1": "/b/x y.csv"}
    )
    assert site.paths == {"live": "/l", "code": "/c/code.tar.gz", "input.a": "/a", "input.b-1": "/b"}
    assert site.exit_code == {"succeeded": 0, "failed": 1, "preempted": 75}
    assert site.scratch[-1] == "/tmp"
    assert (site.machine, Provider.node_environment({"AZ_BATCH_NODE_ID": "tvm-7"}, {}).machine) == ("", "tvm-7")
    assert int(site.export_env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < site.stop_grace
    assert (
        Provider.node_environment({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, {}).export_env[
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        ]
        == "5"
    )


# -------------------------------------------------------------------------------------------------------------- network


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace Linux's folders of devices by empty ones."""
    monkeypatch.setattr(node, "DEVICES", str(tmp_path / "infiniband"))
    monkeypatch.setattr(node, "NETWORKS", str(tmp_path / "net"))
    return tmp_path


def device(machine: Path, name: str, layer: str, state: str = "4: ACTIVE") -> None:
    port = machine / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{layer}\n")


def words(**environ: str) -> dict[str, str]:
    return {k: v for k, v in Provider.node_environment(environ, {}).export_env.items() if k.startswith("NCCL")}


def test_without_infiniband_nothing_is_set(machine: Path) -> None:
    assert words() == {}
    device(machine, "mlx5_an0", "Ethernet")
    device(machine, "mlx5_ib0", "InfiniBand", state="1: DOWN")
    assert words(NCCL_IB_DISABLE="1") == {}


def test_infiniband_is_used_where_it_exists(machine: Path) -> None:
    device(machine, "mlx5_ib0", "InfiniBand")
    assert words(NCCL_IB_DISABLE="1") == {"NCCL_IB_DISABLE": "0"}
    (machine / "net" / "eth0").mkdir(parents=True)
    assert words() == {"NCCL_IB_DISABLE": "0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert words(NCCL_SOCKET_IFNAME="eth1") == {"NCCL_IB_DISABLE": "0"}


def test_the_slow_network_is_kept_out_of_the_fast_one(machine: Path) -> None:
    """Check this because the accelerated Ethernet of a machine is an RDMA device too."""
    for name, layer in (("mlx5_ib0", "InfiniBand"), ("mlx5_ib1", "InfiniBand"), ("mlx5_an0", "Ethernet")):
        device(machine, name, layer)
    assert words()["NCCL_IB_HCA"] == "=mlx5_ib0:1,mlx5_ib1:1"
    assert "NCCL_IB_HCA" not in words(NCCL_IB_HCA="mlx5_ib0")


# -------------------------------------------------------------------------------------------------------------- secrets


class Service(http.server.BaseHTTPRequestHandler):
    """Servers on loopback: the token's endpoint at /token (plain), and a vault at /secrets (TLS)."""

    answers: list[tuple[int, Any]]
    tokens: list[tuple[int, Any]]
    requests: list[tuple[str, dict[str, str], Mapping[str, str]]]

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        self.requests.append((parts.path, dict(urllib.parse.parse_qsl(parts.query)), dict(self.headers)))
        waiting = self.tokens if parts.path == "/token" else self.answers
        status, answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    from worlds.azureml.wire import certificate

    monkeypatch.setattr(TIMINGS, "http_pauses", (0.0, 0.0))
    pem = tmp_path / "pem"
    pem.write_bytes(certificate())
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    given = {"answers": [(200, {"value": "s3cret ü"})], "tokens": [(200, {"access_token": "TK"})], "requests": []}
    handler: Any = type("Handler", (Service,), given)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    plain, vault = (http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2))
    vault.socket = context.wrap_socket(vault.socket, server_side=True)
    threads = [threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.02}) for s in (plain, vault)]
    for thread in threads:
        thread.start()
    handler.reference = f"127.0.0.1:{vault.server_port}/hf-token"
    endpoint = f"http://127.0.0.1:{plain.server_port}/token"
    handler.environ = {"IDENTITY_ENDPOINT": endpoint, "IDENTITY_HEADER": "let me"}
    handler.cluster = {"MSI_ENDPOINT": endpoint, "MSI_SECRET": "let me"}
    yield handler
    for server, thread in zip((plain, vault), threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_secret_is_read_with_the_identity_of_the_job(service: Any) -> None:
    assert secret(service.reference, service.environ) == "s3cret ü"
    (_, parameters, headers), (path, query, vault) = service.requests
    assert (parameters["resource"], headers["X-Identity-Header"]) == ("https://vault.azure.net", "let me")
    assert (path, query) == ("/secrets/hf-token", {"api-version": "7.4"})
    assert vault["Authorization"] == "Bearer TK"
    read = Provider.node_environment(service.environ, {}).secrets
    assert read is not None
    assert read(f"azure:{service.reference}/{'0' * 32}") == "s3cret ü"
    assert service.requests[-1][0] == f"/secrets/hf-token/{'0' * 32}"


def test_a_cluster_has_an_endpoint_of_its_own(service: Any) -> None:
    assert token("https://vault.azure.net", {**service.cluster, "DEFAULT_IDENTITY_CLIENT_ID": "of-the-cluster"}) == "TK"
    _, query, headers = service.requests[0]
    assert query == {"api-version": "2017-09-01", "resource": "https://vault.azure.net", "clientid": "of-the-cluster"}
    assert headers["Secret"] == "let me"


def test_the_client_id_of_an_identity_of_the_users(service: Any) -> None:
    token("r", {**service.environ, "AZURE_CLIENT_ID": "mine", "DEFAULT_IDENTITY_CLIENT_ID": "of-the-cluster"})
    assert service.requests[0][1]["client_id"] == "mine"


@for_each(
    ("vault", "host", "resource"),
    [
        ("team", "team.vault.azure.net", "https://vault.azure.net"),
        ("team.vault.azure.cn", "team.vault.azure.cn", "https://vault.azure.cn"),
        ("team.vault.usgovcloudapi.net", "team.vault.usgovcloudapi.net", "https://vault.usgovcloudapi.net"),
        ("vault.azure.cn.example.org", "vault.azure.cn.example.org", "https://vault.azure.net"),
    ],
)
def test_each_cloud_has_its_own_vaults(vault: str, host: str, resource: str) -> None:
    assert place(f"{vault}/x") == (f"https://{host}/secrets/x?api-version=7.4", resource)


def test_passing_faults_are_retried(service: Any) -> None:
    throttled = (429, {"error": {"message": "slow"}})
    service.answers = [throttled, (503, b"<html>"), (200, {"value": "v"})]
    assert secret(service.reference, service.environ) == "v"
    service.answers, service.requests = [throttled], []
    with pytest.raises(StorageError, match=r"was refused \(429\): slow"):
        secret(service.reference, service.environ)
    assert len(service.requests) == 4, "one token, three tries"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((403, {"error": {"code": "Forbidden", "message": "not you"}}), "not you; give it 'Key Vault Secrets User'"),
        ((404, b""), r"\(404\): no reason"),
        ((200, {}), "without a value"),
        ((200, [1]), "without a value"),
    ],
)
def test_a_refusal_is_raised_at_once(service: Any, answer: tuple[int, Any], says: str) -> None:
    service.answers = [answer]
    with pytest.raises(StorageError, match=says):
        secret(service.reference, service.environ)
    assert len(service.requests) == 2


def test_a_job_without_an_identity_gets_a_hint(service: Any) -> None:
    service.tokens = [(400, {"error": "invalid_request", "error_description": "Identity not found"})]
    with pytest.raises(StorageError, match=r"Identity not found; give the job an identity \(azureml\.identity\)"):
        secret(service.reference, service.environ)
    assert len(service.requests) == 1
    service.tokens = [(200, {})]
    with pytest.raises(StorageError, match=r"^the token of the job's identity: an answer without a token$"):
        secret(service.reference, service.environ)


def test_a_vault_with_another_certificate_gets_no_token(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(StorageError, match="does not answer"):
        secret(service.reference, service.environ)
    assert [path for path, _, _ in service.requests] == ["/token"]
