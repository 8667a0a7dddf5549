"""The attempt policy as a table: every category by limits, GPUs, fallback providers and progress."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from rows import for_each

from cloudtrain.errors import CATEGORIES
from cloudtrain.job.job import Job
from cloudtrain.runs.attempts import (
    NO_MACHINES,
    AttemptPolicy,
    Ending,
    History,
    Move,
    Next,
    Stop,
    Usage,
    Wait,
    exception_of,
    next_nodes,
    usage_of,
)

HOUR = 3600
NOTHING = Usage()
BOOM = Ending(exception="ValueError: boom (train.py:3)", checkpoint="step-1")
REPEATED = "the same failure twice with no new checkpoint between"
TIME = "the time limit is used up"

# Categories that another attempt of the same request may cure, and those that another GPU or provider may cure.
RETRIED = {"user_error", "oom", "stalled", "capacity", "preempted", "storage", "infra"}
UNSERVED = {"capacity", "quota"}


def decided(policy: AttemptPolicy, history: History, **given: Any) -> Next | Move | Stop:
    return policy.decide(history, **{"ending": Ending(), "used": NOTHING, **given})


def after(category: str, **given: Any) -> History:
    return History(state="failed", category=category, **given)


def of_one_gpu(category: str, *nodes: int, **given: Any) -> History:
    return after(category, newest=len(nodes) - 1, nodes=nodes, choices=(0,) * len(nodes), **given)


def test_every_category_by_retries() -> None:
    for category, retries, newest in product(CATEGORIES, range(3), range(3)):
        policy, history = AttemptPolicy(max_runtime=HOUR, retries=retries), after(category, newest=newest)
        follows = category in RETRIED and newest < retries
        case = (category, retries, newest)
        assert policy.retries_here(history) is follows, case
        choice = 0 if category == "capacity" else None
        expected = (
            Next(number=newest + 1, choice=choice, limits={"max_runtime": HOUR}) if follows else Stop(category=category)
        )
        assert decided(policy, history) == expected, case


def test_every_category_by_gpus_and_places() -> None:
    """The next GPU comes first, then the next provider, and a retry only after these."""
    for category, retries, next_gpu, may_leave in product(CATEGORIES, (0, 1), (None, 2), (False, True)):
        policy = AttemptPolicy(max_runtime=HOUR, retries=retries)
        history = after(category, next_gpu=next_gpu, may_leave=may_leave)
        expected: Next | Move | Stop = Stop(category=category)
        if category in UNSERVED and next_gpu is not None:
            expected = Next(number=1, choice=2, limits={"max_runtime": HOUR})
        elif category in UNSERVED and may_leave:
            expected = Move()
        elif category in RETRIED and retries:
            choice = 0 if category == "capacity" else None
            expected = Next(number=1, choice=choice, limits={"max_runtime": HOUR})
        case = (category, retries, next_gpu, may_leave)
        assert decided(policy, history) == expected, case
        assert policy.moves(history) is (category in UNSERVED and may_leave), case
        here = (category in RETRIED and bool(retries)) or (category in UNSERVED and next_gpu is not None)
        assert policy.retries_here(history) is here, case


def test_nothing_follows_a_success_or_a_cancel() -> None:
    policy = AttemptPolicy(max_runtime=HOUR, retries=9)
    barred: list[dict[str, Any]] = [{"state": "succeeded"}, {"state": "cancelled"}, {"cancelled": True}]
    for category, bar in product(CATEGORIES, barred):
        history = replace(after(category, next_gpu=1, may_leave=True), **bar)
        assert not policy.retries_here(history), (category, bar)
        assert not policy.moves(history), (category, bar)
        assert decided(policy, history) == Stop(category=category), (category, bar)


def test_attempts_that_the_platform_starts_are_not_the_callers_but_it_may_leave() -> None:
    policy = AttemptPolicy(max_runtime=HOUR, retries=9)
    assert decided(policy, after("infra", starts=False)) == Stop(category="infra")
    assert decided(policy, after("capacity", starts=False, next_gpu=1, may_leave=True)) == Move()


def test_a_refused_first_request_is_not_retried_and_a_later_one_is() -> None:
    policy = AttemptPolicy(max_runtime=HOUR, retries=2)
    assert decided(policy, after("infra", refused=True)) == Stop(category="infra")
    assert isinstance(decided(policy, after("infra", refused=True, newest=1)), Next)
    assert isinstance(decided(policy, after("capacity", refused=True, next_gpu=1)), Next)


@for_each(("choices", "newest", "follows"), [
    ((0,), 0, True), ((0, 0), 1, False), ((0, 1), 1, True), ((0, 1, 1), 2, False), ((0, 1, 2), 2, True),
    ((0, 1, 2, 0), 3, False), ((0, 0, 1), 2, False), ((0, 2), 1, True), ((), 0, True), ((), 1, False),
])  # fmt: skip
def test_another_gpu_is_not_a_retry(choices: tuple[int, ...], newest: int, follows: bool) -> None:
    policy = AttemptPolicy(max_runtime=HOUR, retries=1)
    history = after("infra", newest=newest, choices=choices, nodes=(1,) * len(choices))
    assert policy.retries_here(history) is follows


@for_each("retries", [0, 1, 2])
def test_every_gpu_is_asked_for_with_each_number_of_nodes_before_a_retry(retries: int) -> None:
    """The list's order with the most nodes comes first, then with the next smaller number. A retry starts again."""
    policy, counts, gpus = AttemptPolicy(max_runtime=HOUR, retries=retries), (4, 2, 1), 3
    asked = [(4, 0)]
    while True:
        nodes, choices = zip(*asked, strict=True)
        next_gpu = choices[-1] + 1 if choices[-1] + 1 < gpus else None
        given = {"nodes": nodes, "choices": choices, "node_counts": counts, "next_gpu": next_gpu}
        found = decided(policy, after("capacity", newest=len(asked) - 1, **given))
        if not isinstance(found, Next):
            break
        assert found.choice is not None
        asked.append((found.nodes, found.choice))
    assert asked == [(n, gpu) for n in counts for gpu in range(gpus)] * (retries + 1)


@for_each(("category", "nodes", "counts", "next_gpu", "expected"), [
    ("capacity", (4,), (4, 2, 1), None, 2),
    ("quota", (4,), (4, 2, 1), None, 2),
    ("capacity", (4, 2), (4, 2, 1), None, 1),
    ("capacity", (4, 2, 1), (4, 2, 1), None, 4),  # all of them again, as a retry
    ("capacity", (4,), (4, 2), 1, 4),  # the next GPU of the list comes first
    ("capacity", (4,), (4,), None, 4),
    ("preempted", (4, 2), (4, 2), None, 4),
    ("user_error", (4, 2), (4, 2), None, 4),
    ("infra", (4, 4, 2), (4, 2), None, 4),
    ("capacity", (6, 3), (6, 3, 2), None, 2),
    ("capacity", (4, 2), (2,), None, 2),  # a checkpoint that only 2 nodes can restore
])  # fmt: skip
def test_the_number_of_nodes_of_the_next_attempt(
    category: str, nodes: tuple[int, ...], counts: tuple[int, ...], next_gpu: int | None, expected: int
) -> None:
    history = of_one_gpu(category, *nodes, node_counts=counts, next_gpu=next_gpu)
    assert next_nodes(history) == expected
    found = decided(AttemptPolicy(max_runtime=HOUR, retries=9), history)
    assert isinstance(found, Next)
    assert found.nodes == expected


def test_fewer_nodes_are_not_a_retry() -> None:
    policy = AttemptPolicy(max_runtime=HOUR, retries=1)
    counts, lost = (4, 2, 1), "capacity"

    def follows(category: str, *nodes: int) -> bool:
        return policy.retries_here(of_one_gpu(category, *nodes, node_counts=counts))

    assert [follows(lost, 4), follows(lost, 4, 2), follows(lost, 4, 2, 1)] == [True, True, True]
    assert not follows(lost, 4, 2, 1, 4, 2, 1), "the one retry is used"
    assert follows(lost, 4, 2, 1, 4), "but not by its own smaller requests"
    assert [follows("infra", 4, 2), follows("infra", 4, 2, 4), follows("infra", 4, 2, 4, 2)] == [True, False, False]
    none = replace(policy, retries=0)
    assert none.retries_here(after(lost, nodes=(4,), node_counts=counts))
    assert not none.retries_here(of_one_gpu(lost, 4, 2, 1, node_counts=counts))
    assert not none.retries_here(after("infra", nodes=(4,), node_counts=counts))
    refused = after("quota", refused=True, nodes=(4,), node_counts=counts, may_leave=True)
    assert decided(none, refused) == Next(number=1, choice=0, nodes=2, limits={"max_runtime": HOUR}), "then the place"


def test_ranks_own_files_forbid_fewer_nodes_in_one_line() -> None:
    policy, why = AttemptPolicy(max_runtime=HOUR), "checkpoint step-1 has files of single ranks (rank_3.pt), so ..."
    history = after("capacity", nodes=(4,), node_counts=(4,), bound=why)
    assert decided(policy, history) == Stop(category="capacity", reason=why)
    assert decided(policy, replace(history, category="infra")) == Stop(category="infra")


# --------------------------------------------------------------------------------------------------------------- limits


LIMITS: list[tuple[dict[str, Any], Usage, dict[str, float] | str]] = [
    ({}, Usage(seconds=600), {"max_runtime": 3000}),
    ({}, Usage(seconds=600.5), {"max_runtime": 2999}),
    ({}, Usage(seconds=HOUR - 1), {"max_runtime": 1}),
    ({}, Usage(seconds=HOUR - 0.5), TIME),
    ({}, Usage(seconds=HOUR + 5), TIME),
    ({}, Usage(usd=None, gpu_hours=None), {"max_runtime": HOUR}),
    ({"max_cost": 5.0}, Usage(usd=3.0), {"max_runtime": HOUR, "max_cost": 2.0}),
    ({"max_cost": 5.0}, Usage(usd=0.0), {"max_runtime": HOUR, "max_cost": 5.0}),
    ({"max_cost": 5.0}, Usage(usd=5.0), "max_cost is used up"),
    ({"max_cost": 5.0}, Usage(usd=6.0), "max_cost is used up"),
    ({"max_cost": 5.0}, Usage(usd=None), "the use so far is unknown, so the rest of max_cost cannot be computed"),
    ({"max_gpu_hours": 8.0}, Usage(gpu_hours=2.0), {"max_runtime": HOUR, "max_gpu_hours": 6.0}),
    ({"max_gpu_hours": 8.0}, Usage(gpu_hours=8.0), "max_gpu_hours is used up"),
    ({"max_gpu_hours": 8.0}, Usage(gpu_hours=None),
     "the use so far is unknown, so the rest of max_gpu_hours cannot be computed"),
    ({"max_cost": 5.0, "max_gpu_hours": 8.0}, Usage(seconds=60, usd=1.0, gpu_hours=2.0),
     {"max_runtime": HOUR - 60, "max_cost": 4.0, "max_gpu_hours": 6.0}),
    ({"max_cost": 5.0, "max_gpu_hours": 8.0}, Usage(usd=1.0, gpu_hours=9.0), "max_gpu_hours is used up"),
]  # fmt: skip


def test_every_limit_is_a_sum_over_attempts() -> None:
    for category, (limits, used, left) in product(sorted(RETRIED), LIMITS):
        policy, case = AttemptPolicy(max_runtime=HOUR, retries=3, **limits), (category, limits, used)
        found = decided(policy, after(category, newest=1), used=used)
        if isinstance(left, str):
            assert found == Stop(category=category, reason=left), case
        else:
            assert isinstance(found, Next), case
            assert found.limits == left, case
            assert isinstance(found.limits["max_runtime"], int), case


def test_a_limit_that_is_used_up_leads_to_the_next_place_with_its_own_limits() -> None:
    policy = AttemptPolicy(max_runtime=HOUR, max_cost=5.0)
    history = after("capacity", next_gpu=1, may_leave=True)
    assert decided(policy, history, used=Usage(usd=5.0)) == Move(reason="max_cost is used up")
    assert decided(policy, replace(history, next_gpu=None), used=Usage(usd=5.0)) == Move()


# ------------------------------------------------------------------------------------------------------------- progress


PROGRESS = [
    (BOOM, None, False),
    (BOOM, BOOM, True),
    (BOOM, replace(BOOM, checkpoint=None), False),
    (BOOM, replace(BOOM, exception="ValueError: boom (train.py:4)"), False),
    (replace(BOOM, checkpoint=None), replace(BOOM, checkpoint=None), True),
    (replace(BOOM, exception=""), replace(BOOM, exception=""), False),
]


def test_every_category_by_progress() -> None:
    policy = AttemptPolicy(max_runtime=HOUR, retries=5)
    for category, (ending, before, same) in product(CATEGORIES, PROGRESS):
        found = decided(policy, after(category, newest=1), ending=ending, before=before)
        case = (category, ending, before)
        if category not in RETRIED:
            assert found == Stop(category=category), case
        elif same and category not in UNSERVED:
            assert found == Stop(category=category, reason=REPEATED), case
        else:
            assert isinstance(found, Next), case


def test_the_same_failure_is_the_reason_also_if_a_limit_is_used_up() -> None:
    policy = AttemptPolicy(max_runtime=HOUR, retries=5)
    found = decided(policy, after("user_error", newest=1), ending=BOOM, before=BOOM, used=Usage(seconds=HOUR))
    assert found == Stop(category="user_error", reason=REPEATED)


FAILURE = {"rank": 1, "exception": "ValueError: boom", "file": "/a/b/train.py", "line": 3, "process_exit_code": 1}


@for_each(("category", "reason", "failure", "text"), [
    ("user_error", "x", FAILURE, "ValueError: boom (train.py:3)"),
    ("user_error", "x", {**FAILURE, "file": "C:\\tmp\\train.py", "rank": 0}, "ValueError: boom (train.py:3)"),
    ("user_error", "x", {**FAILURE, "file": None}, "ValueError: boom"),
    ("infra", "x", {**FAILURE, "rank": None, "exception": "was lost: no answer"}, ""),
    ("infra", "x", {**FAILURE, "exception": "was lost: no answer"}, "was lost: no answer (train.py:3)"),
    ("preempted", "x", FAILURE, ""),
    ("preempted", "taken", None, ""),
    ("user_error", "step 3: --lr is missing", {**FAILURE, "exception": None, "process_exit_code": 2}, "exit code 2"),
    ("infra", "x", {**FAILURE, "exception": None, "process_exit_code": -9}, ""),
    ("infra", "x", {**FAILURE, "exception": None, "process_exit_code": None}, ""),
    ("oom", "x", {**FAILURE, "exception": None, "process_exit_code": -9}, "exit code -9"),
    ("oom", "no memory", {**FAILURE, "exception": None, "process_exit_code": None}, "no memory"),
    ("user_error", "x", {**FAILURE, "exception": None, "process_exit_code": -11}, "exit code -11"),
    ("user_error", "the platform says boom", None, "the platform says boom"),
    ("user_error", "the platform says boom", {}, "the platform says boom"),
])  # fmt: skip
def test_what_tells_failures_apart(category: str, reason: str, failure: Any, text: str) -> None:
    assert exception_of(category, reason, failure) == text


def test_an_ending_is_read_as_it_was_recorded() -> None:
    assert Ending.of_record({"exception": "e", "checkpoint": "c"}) == Ending(exception="e", checkpoint="c")
    assert Ending.of_record({"exception": None, "checkpoint": None, "more": 1}) == Ending()
    assert Ending.of_record({}) == Ending()


# -------------------------------------------------------------------------------------------------- waits and job facts


@for_each(("limit", "waited", "expected"), [
    (None, 1e9, Wait()),
    (600, 0.0, Wait(seconds=600.0)),
    (600, 599.0, Wait(seconds=1.0)),
    (600, 600.0, Wait(seconds=0.0)),
    (600, 600.5, Stop(category="capacity", reason="no machines within max_wait (10m)")),
])  # fmt: skip
def test_how_long_an_attempt_may_wait_for_machines(limit: int | None, waited: float, expected: Wait | Stop) -> None:
    assert AttemptPolicy(max_runtime=HOUR, max_wait=limit).decide_wait(waited) == expected
    assert Wait().seconds == float("inf")


def test_a_jobs_limits_are_the_policys() -> None:
    job = Job.make(entry_point="t.py", retries=2, max_runtime=60, max_cost=3, max_gpu_hours=4, max_wait=50)
    policy = AttemptPolicy(max_runtime=60, retries=2, max_cost=3, max_gpu_hours=4, max_wait=50)
    assert AttemptPolicy.of_job(job) == policy


def test_the_use_by_a_result() -> None:
    rows = [
        {"started": "1970-01-01T00:00:10Z", "ended": "1970-01-01T00:00:30Z"},
        {"started": None, "ended": None},
        {"started": "1970-01-01T00:01:00Z", "ended": None},
    ]
    result = {"attempts": rows, "native_id": "n", "cost": {"estimate_usd": 1.5, "gpu_hours": 2.5}}
    assert usage_of(result, 100.0) == Usage(seconds=60.0, usd=1.5, gpu_hours=2.5)
    unknown = {"attempts": [], "native_id": "n", "cost": {"estimate_usd": None, "gpu_hours": None}}
    assert usage_of(unknown, 100.0) == Usage(usd=None, gpu_hours=None)
    assert usage_of({**unknown, "native_id": None}, 100.0) == Usage(), "every request was refused"
    assert usage_of({**result, "native_id": None}, 100.0).gpu_hours == 2.5


def test_the_categories_of_this_table_are_all_that_there_are() -> None:
    assert UNSERVED == NO_MACHINES
    assert set(CATEGORIES) >= RETRIED | UNSERVED
