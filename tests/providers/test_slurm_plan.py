"""Plans and answers of provider ``slurm`` without a cluster: the exact script, refusals, states."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

from cloudtrain.errors import AuthError, LostContactError, NotFoundError, PlatformError, QuotaError, SpecError
from cloudtrain.job.job import Job, run_tag
from cloudtrain.provider_api.protocol import Layout, LayoutInput, Request
from cloudtrain.providers.slurm import Provider
from cloudtrain.providers.slurm.api import HELP, error_of, job_of, parsed
from cloudtrain.providers.slurm.api import Job as Known
from cloudtrain.providers.slurm.node import node_environment, secret
from cloudtrain.providers.slurm.status import status_of

NATIVE = "7:/store/runs/r/native/slurm-2-0"


def layout(**change: Any) -> Layout:
    given: dict[str, Any] = {"store": "file:///store", "run_id": "r", "code_digest": "c", "runtime_digest": "d"}
    return Layout(**{**given, **change})


def planned(
    settings: Mapping[str, Any] | None = None, at: Layout | None = None, attempt: int = 0, **job: Any
) -> Request:
    made = Provider(**(settings or {}))
    return made.plan(Job.make(**{"entry_point": "train.py", "name": "x", **job}), at or layout(), attempt)


def options(request: Request) -> dict[str, str]:
    """Return the options of sbatch in the script itself."""
    lines = [line for line in request.body["script"].splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.removeprefix("#SBATCH --").partition("=") for line in lines)}


# ------------------------------------------------------------------------------------------------------------- the plan


def test_the_script_has_the_options_of_the_job() -> None:
    given = {"partition": "gpu", "account": "lab", "constraint": "ib", "extra": {"exclusive": True, "nice": 5}}
    request = planned(given, instance_count=2, gpu=("H100:8",), cpus=16, memory_gb=100, disk_gb=50, instance_type="x")
    found = options(request)
    assert found.pop("job-name").startswith("r-")
    assert found.pop("comment") == '"{\\"cloudtrain.run\\":\\"r\\",\\"cloudtrain.name\\":\\"x\\"}"'
    assert found == {
        "output": "/store/runs/r/native/slurm-0-0/batch.log", "open-mode": "append", "export": "NONE", "requeue": "",
        "nodes": "2", "ntasks-per-node": "1", "time": "1440", "partition": "gpu", "account": "lab",
        "constraint": '"ib&x"', "gpus-per-node": "h100:8", "cpus-per-task": "16", "mem": "100G", "tmp": "50G",
        "exclusive": "", "nice": "5",
    }  # fmt: skip


@for_each(
    ("types", "gpu", "wanted"),
    [
        ({}, "A100-80GB:4", "a100-80gb:4"),
        ({"A100": "nvidia_a100"}, "A100-80GB:4", "nvidia_a100:4"),
        ({"A100-80GB": "big", "A100": "small"}, "A100-80GB:4", "big:4"),
        ({"A100": ""}, "A100:4", "4"),
    ],
)
def test_the_type_of_a_gpu_is_the_cluster_s(types: dict[str, str], gpu: str, wanted: str) -> None:
    assert options(planned({"gres_type": types}, gpu=(gpu,)))["gpus-per-node"] == wanted


def test_ports_of_jobs_of_one_machine_differ_also_after_restarts() -> None:
    lines = planned().body["script"].splitlines()
    (line,) = (line for line in lines if line.startswith("port=$((20000 "))
    formula = line.removeprefix("port=$((").removesuffix("))")
    jobs = [(job, restart) for job in range(7_000, 7_400) for restart in range(8)]
    ports = {eval(formula, {}, {"job": job, "restart": restart}) for job, restart in jobs}
    assert len(ports) == len(jobs)
    assert all(port % 2 == 0 and 20_000 <= port < 32_000 for port in ports)


@for_each(
    ("seconds", "max_time", "minutes", "limit", "parts"),
    [
        (2, 0, 1, 2, False),
        (60, 0, 2, 60, False),
        (1234, 0, 22, 1234, False),
        (86400, 0, 1440, 86370, False),
        (86400, 86400, 1440, 86370, False),
        (86401, 86400, 1440, 86401, True),
        (7 * 86400, 3600, 60, 7 * 86400, True),
    ],
)
def test_the_time_limit_is_that_of_all_starts(
    seconds: int, max_time: int, minutes: int, limit: int, parts: bool
) -> None:
    """Check that the script ends the job early enough for the grace before Slurm would."""
    request = planned({"max_time": max_time}, max_runtime=seconds)
    assert options(request)["time"] == str(minutes)
    assert f" limit={limit} " in request.body["script"]
    assert ("signal" in options(request)) == parts
    assert Provider().launch_spec(request).rules.time_limit == seconds


@for_each(("nodes", "hosts"), [(1, [None]), (2, ["slurm-node-0", "slurm-node-1"])])
def test_a_rehearsal_has_the_nodes_of_the_request(nodes: int, hosts: list[str | None]) -> None:
    specs = Provider().launch_spec(planned(instance_count=nodes)).nodes
    assert [(node.hostname, node.env["SLURM_NODEID"]) for node in specs] == [(h, str(n)) for n, h in enumerate(hosts)]
    run = "/store/runs/r"
    paths = {f"{run}/live": "sync", f"{run}/checkpoints": "sync", f"{run}/container/context.json": "mount"}
    paths |= {f"{run}/container/key": "mount"}
    paths |= {"/store/runtime/d/cloudtrain.pyz": "mount", "/store/code/c/code.tar.gz": "mount"}
    assert {mount.path: (mount.url, mount.kind) for mount in specs[-1].mounts} == {
        path: (f"file://{path}", kind) for path, kind in paths.items()
    }
    assert f"direct={run}/checkpoints" in specs[-1].command, "a script may write its own checkpoints by their path"


def test_another_request_has_another_name() -> None:
    """Check this because another job may get a run's id while Slurm still knows the former job."""
    names = {options(planned(**job))["job-name"] for job in ({}, {"cpus": 2}, {"max_runtime": 60})}
    names |= {options(planned(attempt=1))["job-name"]}
    assert len(names) == 4
    assert planned() == planned()


@for_each(
    ("settings", "job", "at", "field"),
    [
        ({}, {"spot": True}, {}, "resources.spot"),
        ({}, {"shm_gb": 4}, {}, "resources.shm_gb"),
        ({}, {"image": "a/b:1"}, {}, "image"),
        ({"container": "pyxis"}, {}, {}, "image"),
        ({"container": "singularity"}, {}, {}, "slurm.container"),
        ({}, {}, {"store": "s3://bucket/x"}, "store"),
        ({}, {}, {"store": "sftp://host/x"}, "store"),
        ({"mounts": {"s3://other": "/m"}}, {}, {"store": "s3://bucket/x"}, "store"),
        ({"mounts": {"s3://bucket/team": "/m"}}, {}, {"store": "s3://bucket/teams"}, "store"),
        ({"mounts": {"s3://bucket": "/m"}}, {}, {}, "store"),
        ({"mounts": {"s3://bucket": "/m"}}, {}, {"store": "s3://bucket/x"}, "slurm.folder"),
        ({"mounts": {"s3://bucket": "m"}}, {}, {}, "slurm.mounts.s3://bucket"),
        ({"mounts": {"s3://bucket": 1}}, {}, {}, "slurm.mounts.s3://bucket"),
        ({"mounts": {"https://host": "/m"}}, {}, {}, "slurm.mounts.https://host"),
        ({"mounts": {"data": "/m"}}, {}, {}, "slurm.mounts.data"),
        ({"folder": "logs"}, {}, {}, "slurm.folder"),
        ({}, {}, {"store": "file:///a%20b"}, "store"),
        ({}, {}, {"store": 'file:///a"b'}, "store"),
        ({}, {"inputs": {"d": {"url": "/d", "mode": "copy"}}}, {}, "inputs.d.mode"),
        ({}, {"inputs": {"d": {"url": "/d", "shard": True}}}, {}, "inputs.d.shard"),
        ({}, {}, {"inputs": {"d": LayoutInput(url="s3://b/k")}}, "inputs.d"),
        ({}, {"secrets": {"A": "aws:x"}}, {}, "secrets.A"),
        ({}, {"tags": {"cloudtrain.run": "x"}}, {}, "tags.cloudtrain.run"),
        ({}, {"tags": {"a": "b" * 1024}}, {}, "tags"),
        ({"extra": {"array": "1-5"}}, {}, {}, "slurm.extra.array"),
        ({"extra": {"-p": "x"}}, {}, {}, "slurm.extra.-p"),
        ({"extra": {"nodes": 2}}, {}, {}, "slurm.extra.nodes"),
        ({"extra": {"mail-user": "a\nb"}}, {}, {}, "slurm.extra.mail-user"),
        ({"host": "-oProxyCommand=x"}, {}, {}, "slurm.host"),
        ({"partition": "a\n#SBATCH --uid=0"}, {}, {}, "slurm.partition"),
        ({"max_time": 60}, {}, {}, "slurm.max_time"),
        ({"setup": "module load x"}, {}, {}, "slurm.setup"),
        ({}, {"options": {"slurm": {"sbatch": {"nodes": 3}}}}, {}, "options.slurm.sbatch.nodes"),
        ({}, {"options": {"slurm": {"script": "x"}}}, {}, "options.slurm.script"),
        ({}, {"options": {"slurm": {"sbatch": {"wrap": "x"}}}}, {}, "options.slurm.sbatch.wrap"),
    ],
)
def test_unsupported_jobs_are_refused(
    settings: dict[str, Any], job: dict[str, Any], at: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError) as caught:
        planned(settings, layout(**at), **job)
    assert caught.value.field == field
    assert getattr(caught.value, "provider", "slurm") == "slurm"


@for_each(
    ("bucket", "mount"),
    [
        ("s3://data", "/mnt/bucket"),
        ("gs://data/team/", "/mnt/team/"),
        ("abfs://data@account.dfs.core.windows.net", "/mnt"),
    ],
)
def test_nodes_see_a_bucket_where_it_is_mounted(bucket: str, mount: str) -> None:
    """Check that Slurm's own files are in a folder of the nodes, as a mount can neither rename nor append."""
    given = {"mounts": {bucket: mount, "/scratch": "/nodes/scratch"}, "folder": "/home/me/runs/"}
    url, there = bucket.rstrip("/"), mount.rstrip("/")
    inputs = {"a": LayoutInput(url=f"{url}/set"), "b": LayoutInput(url="file:///scratch/x.csv", file="x.csv")}
    request = planned(given, layout(store=f"{url}/s", inputs=inputs, resume=f"{url}/old"), secrets={"A": "env:A"})
    run, words = f"{url}/s/runs/r", request.body["command"]
    base = f"/home/me/runs/r-{run_tag(run)}/slurm-0-0"
    assert words[:5] == ["python3", f"{there}/s/runtime/d/cloudtrain.pyz", "run", "--context",
                         f"{there}/s/runs/r/container/context.json"]  # fmt: skip
    assert words[8::2] == [
        f"code={there}/s/code/c/code.tar.gz", f"live={there}/s/runs/r/live", f"mounted={there}/s/runs/r/checkpoints",
        f"resume={there}/old", f"input.a={there}/set", "file.b=/nodes/scratch/x.csv", "grace=30",
        f"secrets={base}/secrets", "flush=30",
    ]  # fmt: skip
    assert options(request)["output"] == f"{base}/batch.log"
    assert f"\nbase={base} live={there}/s/runs/r/live " in request.body["script"]
    assert request.context["checkpoint_url"] == f"{run}/checkpoints"
    made = Provider(**given)
    assert made.schemes == {url.partition(":")[0], "file"}
    urls = {mount.url for mount in made.launch_spec(request).nodes[0].mounts}
    assert {f"{run}/live", f"{url}/set", f"{url}/old", "file:///scratch/x.csv"} < urls
    assert not any("secrets" in url for url in urls)


def test_a_refused_bucket_gives_a_hint() -> None:
    with pytest.raises(SpecError, match="its nodes do not see s3://bucket/x") as caught:
        planned(None, layout(store="s3://bucket/x"))
    assert caught.value.hint.endswith('[slurm.mounts] "s3://bucket" = "/mnt/bucket"')
    assert Provider(mounts={"s3://bucket": "/mnt/bucket"}).schemes == {"s3"}, "local inputs must be uploaded"
    assert Provider().schemes == {"file"}


def test_a_container_sees_the_store_and_the_inputs() -> None:
    at = layout(inputs={"d": LayoutInput(url="file:///data/d")})
    pyxis = planned({"container": "pyxis"}, at, image="nvcr.io#nvidia/pytorch:1").body["script"]
    assert "'--container-image=nvcr.io#nvidia/pytorch:1' --container-mounts=/data/d:/data/d,/store:/store" in pyxis
    mounts = {"mounts": {"s3://b": "/m"}, "folder": "/home/me"}
    bucket = planned({"container": "pyxis", **mounts}, layout(store="s3://b/s"), image="a").body["script"]
    assert "--container-mounts=/home/me:/home/me,/m/s:/m/s " in bucket
    apptainer = planned({"container": "apptainer"}, at, image="/images/a.sif", gpu=("H100:1",)).body["script"]
    assert "apptainer exec --nv --bind /data/d:/data/d,/store:/store /images/a.sif python3 /store/runtime" in apptainer


def test_strange_names_are_quoted_for_bash(tmp_path: Path) -> None:
    store = "file:///shared/it's $HOME `id` & co"
    request = planned(None, layout(store=store), gpu=("H100:1",))
    file = tmp_path / "job.sh"
    file.write_text(request.body["script"])
    subprocess.run(["bash", "-n", str(file)], check=True)
    line = next(line for line in request.body["script"].splitlines() if line.startswith("base="))
    done = subprocess.run(["bash", "-c", f'{line}; printf %s "$base"'], capture_output=True, text=True, check=True)
    assert done.stdout == f"{store.removeprefix('file://')}/runs/r/native/slurm-0-0"


# ------------------------------------------------------------------------------------------------------------- answers


def known(rows: tuple[tuple[str, ...], ...] = (), marks: Mapping[str, str] | None = None, **fields: str) -> Known:
    return Known(fields=fields, rows=rows, marks=marks or {})


@for_each(
    ("fields", "state", "category"),
    [
        ({"JobState": "PENDING", "Reason": "Resources"}, "pending", "capacity"),
        ({"JobState": "PENDING", "Reason": "QOSMaxGRESPerUser"}, "pending", "quota"),
        ({"JobState": "PENDING", "Reason": "PartitionTimeLimit"}, "pending", "spec"),
        ({"JobState": "PENDING", "Reason": "JobHeldUser"}, "pending", ""),
        ({"JobState": "REQUEUE_HOLD", "Reason": "job_requeued_in_held_state"}, "pending", ""),
        ({"JobState": "RUNNING"}, "running", ""),
        ({"JobState": "COMPLETING"}, "running", ""),
        ({"JobState": "A_NEW_ONE"}, "running", ""),
        ({"JobState": "COMPLETED", "ExitCode": "0:0"}, "succeeded", ""),
        ({"JobState": "CANCELLED"}, "cancelled", "cancelled"),
        ({"JobState": "TIMEOUT"}, "failed", "timeout"),
        ({"JobState": "FAILED", "ExitCode": "124:0"}, "failed", "timeout"),
        ({"JobState": "FAILED", "ExitCode": "231:0"}, "failed", "preempted"),
        ({"JobState": "FAILED", "ExitCode": "230:0"}, "failed", "infra"),
        ({"JobState": "FAILED", "ExitCode": "2:0"}, "failed", "image"),
        ({"JobState": "FAILED", "ExitCode": "255:0"}, "failed", "user_error"),
        ({"JobState": "FAILED", "ExitCode": "0:53"}, "failed", "infra"),
        ({"JobState": "FAILED", "ExitCode": "1:0"}, "failed", "user_error"),
        ({"JobState": "OUT_OF_MEMORY"}, "failed", "oom"),
        ({"JobState": "NODE_FAIL"}, "failed", "infra"),
        ({"JobState": "PREEMPTED"}, "failed", "preempted"),
        ({"JobState": "DEADLINE"}, "failed", "capacity"),
    ],
)
def test_states_of_slurm(fields: dict[str, str], state: str, category: str) -> None:
    found = status_of(NATIVE, known(**fields))
    assert (found.state, found.category) == (state, category)
    assert bool(found.reason) == (state not in ("succeeded", "running")) or fields["JobState"] == "COMPLETING"


@pytest.mark.parametrize("why", ["JobHeldAdmin", "job_requeued_in_held_state", "launch_failed_requeued_held"])
def test_a_job_that_slurm_itself_holds_needs_the_administrator(why: str) -> None:
    found = status_of(NATIVE, known(JobState="PENDING", Reason=why))
    assert (found.state, found.reason) == ("pending", f"Slurm holds it ({why}): ask your administrator")


@pytest.mark.parametrize(
    ("state", "nodes", "machine"),
    [("NODE_FAIL", "n2", "n2"), ("NODE_FAIL", "n[2-3]", ""), ("BOOT_FAIL", "(null)", ""), ("PREEMPTED", "n2", "")],
)
def test_slurm_names_the_only_machine_of_a_job_that_it_lost(state: str, nodes: str, machine: str) -> None:
    assert status_of(NATIVE, known(JobState=state, NodeList=nodes)).attempts[-1].machine == machine
    rows = ((state, "0:0", "100", "150", nodes),)
    assert status_of(NATIVE, known(rows)).attempts[-1].machine == machine


def test_a_kill_for_memory_names_the_job_s_limit() -> None:
    """Check this because slurmstepd writes the cause to the job's log. The job itself failed, or lost its batch
    script."""
    for fields, limit in (({"MinMemoryNode": "4G"}, ", 4G a node"), ({"MinMemoryCPU": "500M"}, ", 500M a core")):
        for ended in ({"JobState": "FAILED", "ExitCode": "137:0"}, {"JobState": "OUT_OF_MEMORY", "ExitCode": "0:125"}):
            found = status_of(NATIVE, known(marks={"oom": "", "end": "137"}, **ended, **fields))
            assert (found.state, found.category) == ("failed", "oom")
            assert found.reason == f"it used more memory than its limit{limit}; ask for more with --memory-gb"
    assert status_of(NATIVE, known(marks={"oom": "", "end": "1"})).category == "oom"
    assert status_of(NATIVE, known(marks={"oom": ""}, JobState="FAILED", ExitCode="124:0")).category == "oom"


def test_starts_are_attempts_with_their_own_ends() -> None:
    rows = (
        ("NODE_FAIL", "0:0", "100", "150", "n3"),
        ("PREEMPTED", "0:0", "None", "190", "n3"),
        ("RUNNING", "0:0", "200", "Unknown", "n4"),
    )
    found = status_of(NATIVE, known(rows, JobState="RUNNING", Restarts="2", StartTime="200"))
    assert [(row.number, row.category, row.started, row.ended) for row in found.attempts] == [
        ("2.0", "infra", 100.0, 150.0), ("2.1", "preempted", None, 190.0), ("2.2", "", 200.0, None),
    ]  # fmt: skip
    assert found.started == 100.0
    assert [row.machine for row in found.attempts] == ["n3", "", ""]
    without = status_of(NATIVE, known(JobState="PENDING", Restarts="2", Reason="BeginTime", StartTime="300"))
    assert [(row.number, row.started) for row in without.attempts] == [("2.0", None), ("2.1", None), ("2.2", None)]


def test_a_forgotten_job_has_the_end_that_its_script_wrote() -> None:
    ends = {code: status_of(NATIVE, known(marks={"end": code})) for code in ("0", "1", "124")}
    assert [(end.state, end.category) for end in ends.values()] == [
        ("succeeded", ""), ("failed", "user_error"), ("failed", "timeout"),
    ]  # fmt: skip
    assert status_of(NATIVE, known(marks={"cancelled": ""})).state == "cancelled"
    assert status_of(NATIVE, known(marks={"cancelled": "", "end": "0"})).state == "succeeded"
    with pytest.raises(NotFoundError, match="no longer knows job 7"):
        status_of(NATIVE, known())


def test_a_tag_cannot_pass_for_a_field() -> None:
    text = "job JobId=7 JobState=RUNNING Restarts=1 Comment={a JobState=FAILED Restarts=9}\nrow FAILED|1:0|1|2|n1\n"
    found = parsed(f"mark end=1\n{text}")
    assert (found.fields["JobState"], found.fields["Restarts"]) == ("RUNNING", "1")
    assert found.rows == [["FAILED", "1:0", "1", "2", "n1"]]
    assert found.marks == {"end": "1"}


@for_each(
    ("message", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", SpecError),
        ("sbatch: error: invalid partition specified: slow", SpecError),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", LostContactError),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", SpecError),
        ("sbatch: error: Batch submission failed: Job violates accounting/QOS policy (job limit)", QuotaError),
        ("sbatch: error: Batch job submission failed: Protocol authentication error", AuthError),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", LostContactError),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", LostContactError),
        ("something new", PlatformError),
    ],
)  # fmt: skip
def test_messages_of_slurm_become_errors(message: str, kind: type[Exception]) -> None:
    found = error_of(message, what="submit")
    assert type(found) is kind
    assert ("run: sinfo" in found.hint) == (kind is SpecError)


def test_tools_without_a_cluster_say_so_in_one_line() -> None:
    answer = "\n".join([
        "sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host",
        "sinfo: error: fetch_config: DNS SRV lookup failed",
        "sinfo: error: _establish_config_source: failed to fetch config",
        "sinfo: fatal: Could not establish a configuration source",
    ])  # fmt: skip
    error = error_of(answer, what="ask for the nodes", where="this machine")
    assert str(error) == "ask for the nodes: the tools of Slurm on this machine find no cluster"
    assert (error.hint, type(error)) == (HELP["none"], LostContactError)
    assert str(error_of(answer, what="submit", code=75, where="login")).endswith(
        "the tools of Slurm on login find no cluster"
    )


@for_each("native", ["", "7", "x:/a", "7:a", ":/a"])
def test_an_id_of_another_form_is_not_found(native: str) -> None:
    with pytest.raises(NotFoundError):
        job_of(native)


# ------------------------------------------------------------------------------------------------------------- the node


def test_a_node_s_topology_and_signal_shield() -> None:
    environ = {
        "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "SLURM_CPUS_ON_NODE": "16",
        "CLOUDTRAIN_SLURM_PORT": "20002", "CLOUDTRAIN_SLURM_ATTEMPT": "1.3", "SLURM_TMPDIR": "/local",
    }  # fmt: skip
    found = node_environment(environ, {"live": "/live", "file.d": "/data/d.csv", "grace": "40", "flush": "30"})
    place = found.topology
    assert (place.nodes, place.node_rank, place.master_addr, place.master_port) == (2, 1, "10.0.0.7", 20002)
    assert found.paths == {"live": "/live", "input.d": "/data"}
    assert (found.attempt, found.cpus, found.stop_grace, found.signals_ranks) == ("1.3", 16, 40.0, True)
    assert found.scratch[0] == "/local"
    assert (found.export_env, found.flush_seconds) == ({}, 30.0)
    with pytest.raises(SpecError, match="no task of srun"):
        node_environment({}, {})


def test_a_secret_comes_from_the_file_and_never_shows(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text('{"A": "s3cret"}')
    assert secret("A", str(file)) == "s3cret"
    for name, path in (("B", file), ("A", tmp_path / "none")):
        with pytest.raises(Exception, match="cannot be read") as caught:
            secret(name, str(path))
        assert "s3cret" not in str(caught.value)


def test_excluded_machines_are_an_option_of_sbatch() -> None:
    plain, request = (
        planned(),
        Provider(exclude="n[1-2]")
        .without_machines(["n7"])
        .plan(Job.make(entry_point="train.py", name="x"), layout(), 0),
    )
    assert options(request)["exclude"] == '"n[1-2],n7"'
    assert options(request)["job-name"] != options(plain)["job-name"]
    found = node_environment({"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n7"}, {})
    assert found.machine == "n7"
