"""``min_gpu_util``: when GPUs count as idle, and when nothing is known about them."""

from __future__ import annotations

from rows import for_each

from cloudtrain.runtime.idle import IdleGpus
from cloudtrain.runtime.timings import TIMINGS

STEP = int(TIMINGS.usage)
RULE = "5% for 5m"
SECONDS = 300

Samples = list[list[float | None]]


def ended(samples: Samples, *, metrics_at: float = 0) -> tuple[float, str] | None:
    """Return when the run counts as stalled and why, or None. ``samples`` has each node's samples in order; None is a
    gap."""
    gpus = IdleGpus(RULE)
    for number in range(max(map(len, samples), default=0)):
        now = float((number + 1) * STEP)
        for node, row in enumerate(samples):
            if number < len(row) and (used := row[number]) is not None:
                gpus.take(node, used, now)
        if why := gpus.reason(now, has_metrics=now >= metrics_at):
            return now, why
    return None


IDLE: list[float | None] = [2.0] * 60
LONG = 10**9


@for_each(
    ("samples", "metrics_at", "end"),
    [
        ([IDLE], 0, STEP + SECONDS),
        ([[0.0] * 20 + [2.0] * 40], 0, STEP + SECONDS),
        ([IDLE, IDLE], 0, STEP + SECONDS),
        ([IDLE], 600, 600 + SECONDS),  # an hour of downloads counts for nothing
        ([IDLE], LONG, None),  # nor does a start without end: stall_timeout is for that
        ([[*IDLE[:9], 30.0, *IDLE]], 0, 10 * STEP + SECONDS),
        ([[5.0] * 60], 0, None),
        ([IDLE, [9.0] * 60], 0, None),  # one node is busy
        ([IDLE, []], 0, STEP + SECONDS),  # a node without GPUs
        ([[30.0] * 4 + IDLE], LONG, 4 * STEP + SECONDS),  # busy for a minute: training, if there are no metrics
        ([[30.0] * 3 + IDLE], LONG, None),
        ([], 0, None),
        ([IDLE, [2.0] * 5], 0, None),  # its nvidia-smi has failed: the use is unknown
        ([IDLE[:10] + [None] * 5 + IDLE], 0, 16 * STEP - STEP + SECONDS),
    ],
)
def test_when_a_run_is_idle(samples: Samples, metrics_at: float, end: float | None) -> None:
    found = ended(samples, metrics_at=metrics_at)
    assert (found and found[0]) == end


def test_the_reason_has_what_was_measured() -> None:
    found = ended([[0.0] * 10 + [3.0] * 60])
    assert found is not None
    assert found[1] == "no GPU was used for 5 % in the last 5m (min_gpu_util): 1.6 % on average, 3 % at most"


def test_a_short_time_takes_some_samples_all_the_same() -> None:
    gpus = IdleGpus("5% for 1s")
    gpus.take(0, 1.0, 0.0)
    assert not gpus.reason(0.0, has_metrics=True)
    for now in range(1, 4):
        gpus.take(0, 1.0, now * 15.0)
        assert not gpus.reason(now * 15.0, has_metrics=True)
    gpus.take(0, 1.0, 60.0)
    assert gpus.reason(60.0, has_metrics=True)
