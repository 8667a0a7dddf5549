"""Provider ``kubernetes``: the meaning of a Job, its pods and its events, as a real cluster of 1.36.2 gave them.

tests/data/kubernetes-scenes.json has the fields of its answers that `status` reads. The recorder left out the Jobs'
spec, so these tests make it up.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

from cloudtrain.errors import CATEGORIES, AuthError, LostContactError, NotFoundError, SpecError
from cloudtrain.provider_api.protocol import STATES, LogPage, Status
from cloudtrain.providers.kubernetes import Settings, logs
from cloudtrain.providers.kubernetes.api import Account, error_of
from cloudtrain.providers.kubernetes.request import CANCELLED, ENDED
from cloudtrain.providers.kubernetes.status import status, status_of

SCENES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "kubernetes-scenes.json").read_text(encoding="utf-8")
)
NATIVE = "team/sc"
AT = 1795441740.0
"""2026-11-23T13:49:00Z, the minute of most scenes."""
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


def scene(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a copy of a scene's Job and pods. ``no image`` is the scene ``img`` with a registry's message for a
    missing image."""
    found = copy.deepcopy(SCENES["img" if name == "no image" else name])
    if name == "no image":
        waiting = found["pods"][0]["status"]["containerStatuses"][0]["state"]["waiting"]
        waiting["message"] = 'Back-off pulling image "registry.invalid/none:1": ErrImagePull: manifest unknown'
    found["job"]["metadata"].setdefault("uid", "of-the-job")  # the recordings lack it; a JobSet's Job has none yet
    return found["job"], found["pods"]


class Cluster:
    """An account with one scene that keeps its calls; ``refuses`` is the error of a cancel."""

    def __init__(self, name: str, *, events: Sequence[Any] = (), refuses: Exception | None = None) -> None:
        self.job, self.pods = scene(name)
        self.known = list(events or SCENES.get(name, {}).get("events", ()))
        self.refuses = refuses
        self.reasons: list[str] = []

    def describe(self, native_id: str) -> tuple[Any, Any]:
        return self.job, self.pods

    def events(self, kind: str, item: Any, reasons: Any) -> list[Any]:
        if self.known == ["denied"]:
            raise AuthError("you may not list events")
        return self.known

    def cancel(self, native_id: str, *, why: str = "") -> None:
        self.reasons.append(why)
        if self.refuses is not None:
            raise self.refuses
        self.job["metadata"]["annotations"][ENDED] = why

    def status(self) -> Status:
        return status(self, NATIVE)  # type: ignore[arg-type]


def failed_with(code: int, *, reason: str = "Error", **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the scene of a failed Job whose pod ended with ``code``; ``more`` are fields of the pod's status."""
    job, pods = scene("fail")
    pods[0]["status"]["containerStatuses"][0]["state"]["terminated"] |= {"exitCode": code, "reason": reason}
    pods[0]["status"] |= more
    return job, pods


# -------------------------------------------------------------------------------------------------------------- scenes

MEANINGS = {
    "cancel running": ("running", "", "Running", ""),
    "evict running": ("running", "", "Running", ""),
    "evict terminating": ("running", "", "Running", ""),
    "evict again": ("pending", "", "Restarting", "start again"),
    "evict restarted": ("running", "", "Running", ""),
    "cancel stopping": ("running", "", "Ending", "stopping"),
    "cancel pods over": ("running", "", "Ending", "stopping"),
    "cancel ended": ("cancelled", "cancelled", "Failed: DeadlineExceeded", "cancelled"),
    "ok": ("succeeded", "", "Complete", ""),
    "fail": ("failed", "user_error", "Failed: PodFailurePolicy", "sc-fail-1-k8l57 failed with exit code 1"),
    "oom": ("failed", "oom", "Failed: PodFailurePolicy", "memory_gb"),
    "127": ("failed", "image", "Failed: PodFailurePolicy", "exit code 127: it may have no Python"),
    "noexec": ("failed", "image", "Failed: PodFailurePolicy", 'exec: "/nonsuch"'),
    "img": ("pending", "", "ImagePullBackOff", "i/o timeout"),  # the registry may answer later
    "quota": ("failed", "quota", "FailedCreate", "exceeded quota: none, requested: pods=1"),
    "dead": ("failed", "timeout", "Failed: DeadlineExceeded", "max_runtime"),
    "gpu": ("pending", "capacity", "Unschedulable", "1 Insufficient nvidia.com/gpu"),
    "susp": ("pending", "", "Suspended", "a queue holds it"),
    "sec": ("pending", "", "CreateContainerConfigError", 'secret "none" not found'),
    "cm": ("pending", "", "Pending", ""),
}
"""State, category, native word and a part of the reason, by scene."""


def test_every_scene_has_a_meaning() -> None:
    assert MEANINGS.keys() == SCENES.keys()


@for_each("name", sorted(MEANINGS))
def test_the_meaning_of_a_scene(name: str) -> None:
    found = Cluster(name).status()
    state, category, native, reason = MEANINGS[name]
    assert (found.state, found.category, found.native) == (state, category, native)
    assert reason in found.reason
    assert found.state in STATES
    assert found.category in ("", *CATEGORIES)
    assert "\n" not in found.reason


def test_a_job_that_was_just_created_waits() -> None:
    job = scene("cm")[0]
    job["status"] = {}
    assert status_of(job, []).state == "pending"


def test_times_are_those_of_the_containers() -> None:
    found = status_of(*scene("ok"))
    assert (found.started, found.finished) == (AT + 33, AT + 38), (
        "the Job's condition comes seconds after its pods' end"
    )
    assert [(row.number, row.started, row.ended) for row in found.attempts] == [("0.0", AT + 33, AT + 35)]


def test_a_container_that_could_not_start_has_no_start() -> None:
    assert status_of(*scene("noexec")).started is None, "the cluster says 1970-01-01T00:00:00Z"


# ------------------------------------------------------------------------------------------------------- the job's end


def test_states_only_go_forward_around_the_end() -> None:
    """Check this because the pods end seconds before the Job has its condition."""
    job, pods = scene("ok")
    job["status"]["conditions"] = []
    assert status_of(job, pods).state == "running"
    job["status"]["conditions"] = [{"type": "SuccessCriteriaMet", "status": "True"}]
    assert status_of(job, pods).state == "running"
    job["status"]["conditions"] = [{"type": "FailureTarget", "status": "True"}]
    assert status_of(job, []).state == "running"


@for_each(("code", "category"), [(1, "user_error"), (3, "user_error"), (137, "infra"), (143, "infra"), (76, "timeout")])
def test_the_meaning_of_an_exit_code(code: int, category: str) -> None:
    assert status_of(*failed_with(code)).category == category


@pytest.mark.parametrize(("code", "pods", "machine"), [(137, 1, "w-7"), (137, 2, ""), (1, 1, "")])
def test_the_cluster_names_the_only_machine_of_a_job_whose_pod_was_killed(code: int, pods: int, machine: str) -> None:
    job, found = failed_with(code)
    job["spec"]["completions"], found[0]["spec"]["nodeName"] = pods, "w-7"
    assert status_of(job, found).attempts[-1].machine == machine


def test_a_job_that_completed_before_its_cancel_has_succeeded() -> None:
    job, pods = scene("ok")
    job["metadata"]["annotations"][CANCELLED] = "true"
    assert status_of(job, pods).state == "succeeded"


def test_a_script_that_failed_before_a_cancel_has_failed() -> None:
    job, pods = scene("fail")
    job["metadata"]["annotations"][CANCELLED] = "true"
    assert status_of(job, pods).category == "user_error"


def test_a_pod_that_a_cancel_had_to_kill_was_cancelled() -> None:
    """Check that its exit code, which fails the Job before the Job's own deadline, does not count."""
    job, pods = failed_with(137)
    pods[0]["status"]["reason"] = "DeadlineExceeded"
    job["metadata"]["annotations"][CANCELLED] = "true"
    assert status_of(job, pods).state == "cancelled"


def test_a_pod_that_its_own_limit_had_to_kill_is_a_timeout() -> None:
    job, pods = failed_with(137)
    pods[0]["status"]["reason"] = "DeadlineExceeded"
    assert status_of(job, pods).category == "timeout"


def test_a_cancelled_job_that_a_queue_holds_is_over() -> None:
    job, pods = scene("susp")
    job["metadata"]["annotations"][CANCELLED] = "true"
    found = status_of(job, pods)
    assert (found.state, found.category, found.reason) == ("cancelled", "cancelled", "it was cancelled")


@for_each(
    ("message", "state"),
    [
        ("rpc error: code = Unknown desc = failed to pull and unpack image: dial tcp: i/o timeout", "pending"),
        ("failed to resolve reference: unexpected status: 503 Service Unavailable", "pending"),
        ("manifest unknown: manifest unknown", "failed"),
        ('failed to resolve reference "a/b:1": a/b:1: not found', "failed"),
        ("pull access denied, repository does not exist or may require authorization", "failed"),
    ],
)
def test_only_a_missing_image_fails(message: str, state: str) -> None:
    job, pods = scene("img")
    pods[0]["status"]["containerStatuses"][0]["state"]["waiting"] = {"reason": "ErrImagePull", "message": message}
    assert status_of(job, pods).state == state


def test_a_cancelled_job_does_not_fail_by_its_image() -> None:
    job, pods = scene("no image")
    job["metadata"]["annotations"][CANCELLED] = "true"
    found = status_of(job, pods)
    assert (found.state, found.reason) == ("pending", "stopping")


def test_a_full_disk_is_the_users_and_named() -> None:
    message = 'Usage of EmptyDir volume "scratch" exceeds the limit "10G". '
    found = status_of(*failed_with(137, message=message))
    assert found.category == "user_error"
    assert found.reason == f"node 1: {message.strip().rstrip('.')}; ask for more with disk_gb"


def test_a_pod_that_a_node_did_not_admit_gives_its_reason() -> None:
    message = "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu, which is unexpected"
    job, pods = failed_with(1, message=message)
    del pods[0]["status"]["containerStatuses"]
    for condition in job["status"]["conditions"]:
        condition |= {"reason": "MaxFailedIndexesExceeded", "message": "Job has exceeded the specified maximal number"}
    found = status_of(job, pods)
    assert (found.category, found.reason) == ("infra", f"node 1: {message}")


def test_a_job_does_not_end_for_a_pod_that_it_started_again() -> None:
    job, pods = scene("fail")
    before = scene("evict again")[1][1]
    before["metadata"]["labels"] = {"batch.kubernetes.io/job-completion-index": "0"}
    before["status"]["message"] = "The node was low on resource: memory."
    assert status_of(job, [before, *pods]).category == "user_error"


# ------------------------------------------------------------------------------------------------- starts of the nodes


def test_an_evicted_pod_is_deleted_and_its_start_still_counts() -> None:
    """Check a Job whose index 1 has only its second pod, and index 0 its first: the next attempt begins with node 0."""
    job, pods = scene("evict restarted")
    found = status_of(job, pods)
    assert [(row.number, row.started) for row in found.attempts] == [("0.0", AT + 35)]
    assert found.started == AT + 35
    zero = copy.deepcopy(pods[1])
    zero["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = "0"
    rows = status_of(job, [*pods, zero]).attempts
    assert [(row.number, row.started) for row in rows] == [("0.0", AT + 35), ("0.1", AT + 52)]


def test_a_start_whose_pods_are_gone_is_a_row_without_times() -> None:
    job, pods = scene("evict restarted")
    job["spec"]["completions"] = 1
    pods[1]["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = "0"
    found = status_of(job, pods[1:])
    assert [(row.number, row.started) for row in found.attempts] == [("0.0", None), ("0.1", AT + 52)]


def test_a_server_that_does_not_count_has_a_start_for_each_pod() -> None:
    job, pods = scene("evict again")
    again = copy.deepcopy(pods[1])
    again["status"] = {"phase": "Running", "containerStatuses": pods[0]["status"]["containerStatuses"]}
    for pod in (*pods, again):
        pod["metadata"]["annotations"] = {}
    for pod in (pods[1], again):
        pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = "0"
    pods = pods[1:]
    rows = status_of(job, [*pods, again]).attempts
    assert [row.number for row in rows] == ["0.0", "0.1"]
    assert (rows[0].category, rows[0].reason) == ("preempted", "it was evicted")
    assert rows[1].category == ""


def test_a_start_is_not_over_while_one_of_its_nodes_runs() -> None:
    (row,) = status_of(*scene("evict again")).attempts
    assert (row.started, row.ended) == (AT + 35, None)


def test_the_attempt_is_that_of_the_jobs_label() -> None:
    job, pods = scene("ok")
    job["metadata"]["labels"] = {"cloudtrain.dev/attempt": "3"}
    assert [row.number for row in status_of(job, pods).attempts] == ["3.0"]


@pytest.mark.parametrize("code", [75, 137])
def test_a_node_that_was_taken_begins_again(code: int) -> None:
    """Check this because a lost machine leaves its pod with any exit code; the condition counts."""
    job, pods = scene("evict again")
    pods[1]["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] = code
    assert status_of(job, pods).native == "Restarting"
    pods[1]["status"]["conditions"] = [{**EVICTED, "reason": "DeletionByPodGC"}]
    assert status_of(job, pods).native == "Restarting"


# ---------------------------------------------------------------------------------------------- jobs that cannot start


@pytest.mark.parametrize("name", ["no image", "quota"])
def test_a_job_that_cannot_start_is_ended(name: str) -> None:
    """Check this because it would start its pods once the registry or the quota allows it, next to a later attempt."""
    cluster = Cluster(name)
    first = cluster.status()
    assert cluster.reasons == [f"{first.category}: {first.reason}"]
    cluster.job["status"]["conditions"] = SCENES["dead"]["job"]["status"]["conditions"]
    last = cluster.status()
    assert (last.state, last.category, last.reason) == (first.state, first.category, first.reason)
    assert last.finished == AT + 42
    assert len(cluster.reasons) == 1


@pytest.mark.parametrize("error", [AuthError("you may only read"), NotFoundError("it is gone")])
def test_a_caller_without_the_right_to_end_it_gets_its_status(error: Exception) -> None:
    assert Cluster("no image", refuses=error).status().category == "image"


def test_a_lost_cancel_is_sent_again() -> None:
    with pytest.raises(LostContactError):
        Cluster("no image", refuses=LostContactError("the server does not answer")).status()


@for_each("name", sorted(set(MEANINGS) - {"quota"}))
def test_no_other_job_is_ended(name: str) -> None:
    cluster = Cluster(name)
    cluster.status()
    assert cluster.reasons == []


def test_a_pod_that_was_created_after_a_refusal_counts() -> None:
    """Check this because an evicted pod is deleted, and for some seconds its Job has none."""
    events = [*SCENES["quota"]["events"], {"reason": "SuccessfulCreate", "message": "Created pod: sc-quota-0-x"}]
    assert Cluster("quota", events=events).status().state == "pending"


def test_one_refused_pod_of_two_is_enough() -> None:
    cluster = Cluster("cancel running")
    cluster.known, cluster.pods = list(SCENES["quota"]["events"]), cluster.pods[:1]
    assert cluster.status().category == "quota"


REFUSED = 'Error creating: pods "x" is forbidden: '


@for_each(
    "message, state, category, hint",
    [
        ('error looking up service account team/x: serviceaccount "x" not found', "pending", "", ""),
        ('violates PodSecurity "restricted:latest": runAsNonRoot != true', "pending", "", "kubernetes.security"),
        ("failed quota: team: must specify limits.cpu for: node", "failed", "quota", "set cpus and memory_gb"),
    ],
)
def test_another_refusal_is_shown(message: str, state: str, category: str, hint: str) -> None:
    found = Cluster("quota", events=[{"reason": "FailedCreate", "message": REFUSED + message}]).status()
    assert (found.state, found.category) == (state, category)
    assert found.reason.startswith(REFUSED + message)
    assert (hint or message) in found.reason


def test_a_volume_that_cannot_be_mounted_is_the_reason_of_the_wait() -> None:
    """Check this because the pod itself only says that its container is being created."""
    cluster = Cluster("cm")
    cluster.known = [{"reason": "FailedMount", "message": 'MountVolume.SetUp failed for volume "shared": mount.nfs'}]
    found = cluster.status()
    assert (found.state, found.category, found.native) == ("pending", "", "Pending")
    assert found.reason == 'MountVolume.SetUp failed for volume "shared": mount.nfs'
    cluster.known[0]["message"] = full = "AttachVolume.Attach failed: exceeded quota of disks on this machine"
    found = cluster.status()
    assert (found.state, full in found.reason, cluster.reasons) == ("pending", True, []), "only a quota of pods ends it"
    cluster.known = ["denied"]
    assert cluster.status().reason == ""


def test_a_caller_without_the_right_to_list_events_gets_a_status() -> None:
    assert Cluster("quota", events=["denied"]).status().state == "pending"


def test_a_cancelled_job_does_not_fail_by_its_quota() -> None:
    cluster = Cluster("quota")
    cluster.job["metadata"]["annotations"][CANCELLED] = "true"
    assert (cluster.status().state, cluster.reasons) == ("pending", [])


# ---------------------------------------------------------------------------------------------------------------- logs


class Logs:
    """An account with one pod, whose log is ``lines`` of (nanosecond time, text), with the rules of the real API."""

    def __init__(self, *lines: tuple[str, str]) -> None:
        self.lines = list(lines)
        self.calls = 0
        self.error: Exception | None = None

    def job(self, native_id: str) -> dict[str, Any]:
        return {}

    def pods(self, native_id: str) -> list[dict[str, Any]]:
        return [{"metadata": {"name": "sc-0-x", "labels": {"batch.kubernetes.io/job-completion-index": "0"}}}]

    def log(self, namespace: str, pod: str, **query: str) -> bytes:
        self.calls += 1
        if self.error is not None:
            raise self.error
        since = query.get("sinceTime", "")[:19]
        data = b"".join(f"{time} {text}\n".encode() for time, text in self.lines if time[:19] >= since)
        return data[: int(query.get("limitBytes", len(data)))]

    def page(self, cursor: Any = None) -> LogPage:
        return logs.page(self, NATIVE, cursor)  # type: ignore[arg-type]

    def texts(self, cursor: Any = None) -> list[str]:
        return [line.text for line in self.page(cursor).lines]


def moment(second: int, nano: int) -> str:
    return f"2026-11-23T13:49:{second:02}.{nano:09}Z"


def test_lines_of_the_cursors_second_do_not_come_again() -> None:
    cluster = Logs((moment(1, 1), "a"), (moment(2, 1), "b"), (moment(2, 2), "c"))
    page = cluster.page()
    assert [line.text for line in page.lines] == ["a", "b", "c"]
    assert page.lines[1].time == pytest.approx(AT + 2, abs=0.01)
    cluster.lines += [(moment(2, 3), "d"), (moment(3, 1), "e")]
    assert cluster.texts(json.loads(json.dumps(page.cursor))) == ["d", "e"]


def test_a_page_without_new_lines_keeps_the_cursor() -> None:
    cluster = Logs((moment(1, 1), "a"))
    first = cluster.page()
    second = cluster.page(first.cursor)
    assert (second.lines, second.cursor, second.more) == ((), first.cursor, False)


def test_lines_that_swapped_do_not_come_again() -> None:
    """Check this because the container runtime merges stdout and stderr."""
    cluster = Logs((moment(2, 1), "late"), (moment(1, 9), "early"))
    page = cluster.page()
    assert [line.text for line in page.lines] == ["late", "early"]
    assert cluster.texts(page.cursor) == []


def test_lines_have_their_own_ids() -> None:
    cluster = Logs(*((moment(n // 3, n % 3), "same") for n in range(9)))
    assert len({line.id for line in cluster.page().lines}) == 9


@pytest.mark.parametrize("count", [1, 50])
def test_a_full_page_gets_ahead(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Check this for a line longer than a page, and for all lines of a second together."""
    monkeypatch.setattr(logs, "PAGE_BYTES", 200)
    cluster = Logs(*((moment(1, n), "x" * (1000 // count)) for n in range(count)), (moment(2, 1), "end"))
    found: list[str] = []
    cursor, more = None, True
    while more:
        page = cluster.page(cursor)
        found += [line.text for line in page.lines]
        cursor, more = page.cursor, page.more
        assert cluster.calls < 20
    assert found == ["x" * (1000 // count)] * count + ["end"]


def test_text_that_is_no_utf8_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Logs()
    data = moment(1, 1).encode() + b" \xff\x1b[1mbold\r\n" + moment(1, 2).encode() + b" half"
    monkeypatch.setattr(cluster, "log", lambda *names, **query: data)
    assert cluster.texts() == ["\ufffd\x1b[1mbold"]


def test_a_pod_without_a_log_is_passed_over() -> None:
    cluster = Logs((moment(1, 1), "a"))
    cursor = cluster.page().cursor
    cluster.error = NotFoundError('pods "sc-0-x" not found')
    page = cluster.page(cursor)
    assert (page.lines, page.cursor) == ((), cursor)


# --------------------------------------------------------------------------------------------------------------- calls


class Served(Account):
    """An account that answers calls from `answers`, by their method and the last word of their path, and keeps them."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(Settings(namespace="team"))
        self.answers = answers
        self.calls: list[tuple[str, str, Any]] = []

    def call(self, method: str, path: str, *, what: str, body: Any = None, **query: Any) -> Any:
        self.calls.append((method, path.rpartition("/")[2], body))
        return self.answers.get(f"{method} {path.rpartition('/')[2]}", {})


def event(reason: str, second: int, uid: str | None = "one") -> dict[str, Any]:
    about = {"kind": "Job", "name": "sc", **({"uid": uid} if uid else {})}
    return {
        "reason": reason,
        "message": "",
        "involvedObject": about,
        "lastTimestamp": moment(second, 0),
        "metadata": {},
    }


def test_events_are_those_of_this_job_in_their_order() -> None:
    """Check a name that an earlier Job had: its events stay for an hour."""
    found = [
        event("FailedCreate", 3),
        event("SuccessfulCreate", 3),
        event("FailedCreate", 9, "earlier"),
        event("Suspended", 9),
        event("SuccessfulCreate", 1, None),
    ]
    job = {"metadata": {"name": "sc", "namespace": "team", "uid": "one"}}
    own = Served(**{"GET events": {"items": found}}).events("Job", job, ["FailedCreate", "SuccessfulCreate"])
    assert [(item["reason"], item["lastTimestamp"][17:19]) for item in own] == [
        ("SuccessfulCreate", "01"),
        ("SuccessfulCreate", "03"),
        ("FailedCreate", "03"),
    ]


@pytest.mark.parametrize("ahead", [0.0, -3600.0, 3600.0])
def test_a_cancel_goes_by_the_servers_clock(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    """Check this because a later deadline would start the pods again, and an earlier one delete their logs."""
    monkeypatch.setattr("time.time", lambda: AT + 60 - ahead)
    job, pods = scene("cancel running")
    for pod in pods:
        pod["spec"]["nodeName"] = "node-a"
    account = Served(**{"GET sc": job, "GET pods": {"items": pods}})
    account._ahead = ahead
    account.cancel(NATIVE)
    patches = [(name, body["spec"]) for method, name, body in account.calls if method == "PATCH"]
    assert patches == [
        ("sc-can-0-5ntqm", {"activeDeadlineSeconds": 1}),
        ("sc-can-1-2bjjd", {"activeDeadlineSeconds": 1}),
        ("sc", {"activeDeadlineSeconds": 24 + 8}),
    ]


def test_a_cancel_with_no_pod_to_stop_ends_the_job_at_once() -> None:
    job, pods = scene("gpu")
    account = Served(**{"GET sc": job, "GET pods": {"items": pods}})
    account.cancel(NATIVE)
    assert [(name, body["spec"]) for _, name, body in account.calls[2:]] == [("sc", {"activeDeadlineSeconds": 0})]


@pytest.mark.parametrize("why", ["", "image: none"])
def test_a_job_is_ended_once(why: str) -> None:
    job, pods = scene("cancel running")
    account = Served(**{"GET sc": job, "GET pods": {"items": pods}})
    account.cancel(NATIVE, why=why)
    marks = account.calls[-1][2]["metadata"]["annotations"]
    assert marks == ({ENDED: why} if why else {CANCELLED: "true"})
    job["metadata"]["annotations"] |= marks
    account.calls.clear()
    account.cancel(NATIVE)
    assert [method for method, _, _ in account.calls] == ["GET"]


def test_a_webhooks_refusal_is_of_the_request() -> None:
    message = 'admission webhook "vjob.kb.io" denied the request: spec.suspend: Forbidden'
    assert type(error_of(403, "Forbidden", message, what="create the Job")) is SpecError
