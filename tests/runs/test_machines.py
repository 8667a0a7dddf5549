"""Machines on which attempts fail repeatedly: their names, and the client's reaction."""

from __future__ import annotations

from typing import Any

from rows import for_each

from cloudtrain.provider_api.protocol import AttemptInfo
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runs.attempts import exception_of
from cloudtrain.runs.machines import bad_machine_rows, bad_machines, without_bad_machines
from cloudtrain.runs.outcome import attempt_info, attempt_row, with_exits
from cloudtrain.runs.summary import status_text


def row(number: int, machine: str = "", category: str = "infra") -> dict[str, Any]:
    return attempt_row(AttemptInfo(number=f"{number}.0", machine=machine, category=category))


@for_each(
    ("attempts", "bad"),
    [
        ([], {}),
        ([row(0, "a"), row(1, "b")], {}),
        ([row(0, "a"), row(1, "a")], {"a": 2}),
        ([row(0, "b"), row(1, "a"), row(2, "b"), row(3, "a"), row(4, "b")], {"a": 2, "b": 3}),
        ([row(0, "a"), row(1), row(2, "a", "preempted")], {}),
        ([row(0, "a"), row(1, "a", "oom")], {}),
        ([row(0), row(1)], {}),
    ],
)
def test_a_machine_is_bad_that_ended_two_attempts(attempts: list[dict[str, Any]], bad: dict[str, int]) -> None:
    assert bad_machines(attempts) == bad


def test_a_platform_leaves_a_machine_out_or_status_says_that_it_cannot() -> None:
    twice = [row(0, "n2"), row(1, "n2")]
    slurm = find_provider("slurm")(exclude="n7", partition="p")
    other = without_bad_machines(slurm, twice)
    assert other is not None
    assert (other.settings.exclude, other.settings.partition, slurm.settings.exclude) == ("n7,n2", "p", "n7")
    assert bad_machine_rows(slurm, twice) == [{"machine": "n2", "attempts": 2, "excluded": True}]
    local = find_provider("local")()
    assert without_bad_machines(local, twice) is None
    found = bad_machine_rows(local, twice)
    assert found == [{"machine": "n2", "attempts": 2, "excluded": False}]
    result = {"run_id": "r", "run": "u", "state": "failed", "provider": "local", "attempts": twice}
    text = status_text({**result, "bad_machines": found})
    assert "bad machine  n2: 2 attempts failed on it; local cannot leave out a machine" in text
    result["bad_machines"] = bad_machine_rows(slurm, twice)
    assert "n2: 2 attempts failed on it\n" in status_text(result)  # a run that has ended announces no change
    text = status_text({**result, "state": "running"})
    assert "n2: 2 attempts failed on it; retries leave it out, the platform's own restarts do not\n" in text
    assert without_bad_machines(slurm, twice[:1]) is None


def test_an_attempt_has_the_machine_of_its_root_cause() -> None:
    failure = {"node": 1, "rank": None, "exception": "it has 7 GPUs", "time_ns": 1, "machine": "b"}
    record = {"attempt": "0.0", "node": 0, "outcome": "failed", "category": "infra", "reason": "node 1 …"}
    record |= {"failure": failure, "decided": True, "machine": "a", "started": 1.0, "ended": 2.0}
    info = with_exits(AttemptInfo(number="0.0"), [record], before={}, after={})
    assert (info.machine, info.node, info.category) == ("b", 1, "infra")
    assert attempt_info(attempt_row(info)) == info
    other = with_exits(AttemptInfo(number="0.0", machine="c"), [record], before={}, after={})
    assert other == info, "a node's record has more than the platform"
    gone = with_exits(AttemptInfo(number="0.0", machine="c"), [], before={}, after={})
    assert (gone.machine, gone.category) == ("c", "infra")
    assert bad_machines([attempt_row(gone)] * 2) == {"c": 2}
    assert exception_of("infra", "x", failure) == "", "a retry may get another machine"
    assert exception_of("infra", "x", {**failure, "machine": "", "process_exit_code": None}) == "it has 7 GPUs"
