"""The waits that tests shorten, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from cloudtrain.runtime.timings import Timings, timings_of


def test_each_wait_is_set_by_its_name() -> None:
    assert timings_of("") == Timings()
    assert timings_of("silence=12,restart=0.5") == dataclasses.replace(Timings(), silence=12.0, restart=0.5)


@pytest.mark.parametrize("text", ["max_runtime=5", "silence", "silence=soon"])
def test_no_limit_of_a_job_and_no_nonsense_is_taken(text: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        timings_of(text)
