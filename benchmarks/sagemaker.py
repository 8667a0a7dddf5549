"""The cost of a submission to SageMaker: ``cloudtrain submit --provider sagemaker`` over ``ModelTrainer.train``.

Both submit a tree of 2,000 files to an account on loopback (the control plane of `worlds.sagemaker`, moto for
everything else), for the first time and again, unchanged. Both sides are one process from its start to the accepted
job: CPU and wall seconds, peak memory, requests sent, bytes uploaded. The peer is the package ``sagemaker-train``, in
which SageMaker's own SDK 3 has its ModelTrainer, in a separate venv.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    CLOUDTRAIN,
    Cost,
    Figure,
    Pair,
    cost_of,
    environ,
    median_ratio,
    options,
    parser,
    peer,
    report,
    scratch,
    sides,
    tree,
)

PEER = ("sagemaker-train", "1.27.0")
FILES, BYTES = 2_000, 50_000_000
CPU, REQUESTS, RSS = 0.25, 0.1, 0.5
"""Targets, as shares of the peer's cost."""
TIMES = ("the first time", "again")
# Without its telemetry, and its look-ups of the role and of a default bucket, which are no part of a submission. Its
# other questions to IAM get an answer: moto would fail, and make it wait.
TRAINER = """
import sys
import boto3
from sagemaker.core.helper.session_helper import Session
from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, SourceCode
code, bucket, role, image, name = sys.argv[1:]
ModelTrainer(
    sagemaker_session=Session(boto3.Session(), default_bucket=bucket),
    role=role,
    training_image=image,
    base_job_name=name,
    source_code=SourceCode(source_dir=code, entry_script="train.py"),
    compute=Compute(instance_type="ml.m5.xlarge", instance_count=1, volume_size_in_gb=30),
).train(wait=False, logs=False)
"""
ALLOWED = b"""<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">
<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults><member>
<EvalActionName>s3:PutObject</EvalActionName><EvalDecision>allowed</EvalDecision>
</member></EvaluationResults></SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"""
OPT_OUT = "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n"


@dataclass(frozen=True, kw_only=True)
class Sent(Cost):
    """A submission: its cost, the requests that reached the account, and the bytes of its uploads."""

    requests: int = 0
    uploaded: int = 0
    operations: Mapping[str, int] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------- the account


def serve(folder: Path) -> None:
    """Serve an account until stdin ends. The first line on stdout gives its address; each line on stdin is answered
    with counts."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tests/kit")]
    from worlds.sagemaker.plane import REGISTRY, Plane

    counts, lock = dict[str, int](), threading.Lock()
    uploaded = 0
    application = DomainDispatcherApplication(create_backend_app)

    class Quiet(WSGIRequestHandler):
        def log_request(self, *args: Any) -> None:
            """Print nothing: two thousand lines are no figure."""

    def counted(environment: dict[str, Any], start: Any) -> Any:
        nonlocal uploaded
        method, size = str(environment["REQUEST_METHOD"]), int(environment.get("CONTENT_LENGTH") or 0)
        with lock:
            counts[method] = counts.get(method, 0) + 1
            uploaded += size
        if "/iam/" in environment.get("HTTP_AUTHORIZATION", ""):
            body = environment["wsgi.input"].read(size)
            if b"Action=SimulatePrincipalPolicy" in body:
                start("200 OK", [("Content-Type", "text/xml")])
                return [ALLOWED]
            environment["wsgi.input"] = io.BytesIO(body)
        return application(environment, start)

    server = make_server("127.0.0.1", 0, counted, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    plane = Plane(folder, moto=f"http://127.0.0.1:{server.server_port}", runs=False)
    plane.no_capacity.add("ml.m5.xlarge")  # nothing runs: only the acceptance is measured
    plane.capacity_seconds = 1e9
    bucket = plane.make_bucket(f"benchmark-{uuid.uuid4().hex[:12]}")
    role = plane.make_role("training")
    image = f"{REGISTRY}/team/trainer:1"
    print(json.dumps({"environ": plane.environ(), "bucket": bucket, "role": role, "image": image}), flush=True)
    for _ in sys.stdin:
        with lock:
            answer = {"operations": {**counts, **{name: plane.wire.count(name) for name in set(plane.wire.calls)}}}
            answer |= {"uploaded": uploaded}  # type: ignore[dict-item]
            counts.clear()
            plane.wire.calls.clear()
            uploaded = 0
        print(json.dumps(answer), flush=True)


class Account:
    """`serve` in a separate process: this one stays small, since a child's peak memory begins with its parent's."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--serve", str(folder)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        account = self._ask("")
        self.bucket, self.role, self.image = account["bucket"], account["role"], account["image"]
        config = folder / "sagemaker.yaml"
        config.write_text(OPT_OUT)
        here = {name: value for name, value in environ().items() if not name.startswith("AWS_")}
        quiet = {"SAGEMAKER_VALIDATE_ROLE": "false", "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config)}
        self.environ = {**here, **account["environ"], **quiet}

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line)
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the account ended with {self._server.wait()}")
        return dict(json.loads(answer))

    def sent(self, command: Sequence[str], *, cwd: Path) -> Sent:
        """Run one submission. Return its costs, and the calls that reached the account meanwhile."""
        self._ask("count\n")
        cost = cost_of(command, cwd=cwd, env=self.environ, alone=True)  # this server is a child too
        counts = self._ask("count\n")
        made = counts["operations"]
        if made.get("CreateTrainingJob") != 1:
            raise RuntimeError(f"{command[0]} sent no job: {made}")
        return Sent(
            wall=cost.wall,
            cpu=cost.cpu,
            rss=cost.rss,
            requests=sum(made.values()),
            uploaded=counts["uploaded"],
            operations=made,
        )

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=60)


# ------------------------------------------------------------------------------------------------------------- figures


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
        return 0
    chosen = options(parser(__doc__, count=5, quick=1))
    python = os.environ.get("SAGEMAKER_PYTHON") or str(peer(*PEER) / "bin" / "python")
    with scratch() as folder:
        code = tree(folder / "code", files=FILES, size=BYTES, script="print('hello')\n")
        account = Account(folder)
        found: dict[str, list[Pair]] = {time: [] for time in TIMES}
        for number in range(-1, chosen.pairs):  # the first is not measured: caches of the disk, and bytecode
            both = {"ours": ours(account, number), "peer": theirs(account, python, code, number)}
            for side in sorted(both, reverse=bool(number % 2)):
                times = TIMES if number >= 0 else TIMES[:1]
                both[side] = [account.sent(both[side], cwd=code) for _ in times]  # type: ignore[call-overload]
            for time, mine, other in zip(times, both["ours"], both["peer"], strict=True):
                if number >= 0:
                    found[time].append(Pair(ours=mine, peer=other))  # type: ignore[arg-type]
        account.close()
    return report([figure for time in TIMES for figure in figures(time, found[time])], as_json=chosen.json)


def ours(account: Account, number: int) -> list[str]:
    """Return cloudtrain's command, with a separate store for each pair."""
    flags = ["--store", f"{account.bucket}/store{number}", "--set", f"role={account.role}", "--image", account.image]
    return [CLOUDTRAIN, "submit", "train.py", "--provider", "sagemaker", *flags, "--max-runtime", "1h", "--detach"]


def theirs(account: Account, python: str, code: Path, number: int) -> list[str]:
    """Return the peer's command; it has a separate folder for each job anyway."""
    bucket = account.bucket.removeprefix("s3://")
    return [python, "-W", "ignore", "-c", TRAINER, str(code), bucket, account.role, account.image, f"bench{number + 1}"]


def figures(time: str, found: Sequence[Pair]) -> list[Figure]:
    """Return the figures of all pairs of a first, or of a second submission."""
    again = time == TIMES[1]

    def ratio(what: str, title: str, target: float | None) -> Figure:
        name = f"{title}, 2,000 files, {time}: submit / ModelTrainer"
        return Figure(name=name, value=median_ratio(found, what), target=target, note=sides(found, what), pairs=found)

    requests = ratio("requests", "requests sent", REQUESTS if again else None)
    uploaded = ratio("uploaded", "bytes uploaded", None)
    return [
        ratio("cpu", "CPU", CPU),
        ratio("wall", "wall", None),
        ratio("rss", "peak memory", RSS),
        _counted(requests, found, "requests"),
        _counted(uploaded, found, "uploaded"),
    ]


def _counted(figure: Figure, found: Sequence[Pair], what: str) -> Figure:
    """Return the figure with counts in its note instead of seconds."""
    ours, other = (statistics.median(getattr(getattr(p, side), what) for p in found) for side in ("ours", "peer"))
    note = f"{ours:,.0f} / {other:,.0f}"
    if what == "requests":
        note += f"; ours {dict(sorted(found[-1].ours.operations.items()))}"  # type: ignore[attr-defined]
    return Figure(name=figure.name, value=figure.value, target=figure.target, note=note, pairs=found)


if __name__ == "__main__":
    sys.exit(main())
