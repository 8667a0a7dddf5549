"""The waits that tests may shorten, and no other."""

from __future__ import annotations

import pytest
from rows import for_each

from cloudtrain.runtime.timings import Timings
from cloudtrain.storage.timings import ClientTimings
from cloudtrain.validate import timings_of


def test_each_half_takes_its_own_waits() -> None:
    text = "node.silence=12,client.restart=0.5,node.copy_pauses=0.1/0.2,node.store_pauses=3/"
    assert timings_of(Timings, "node", "") == Timings()
    assert timings_of(Timings, "node", text) == Timings(silence=12, copy_pauses=(0.1, 0.2), store_pauses=(3.0,))
    assert timings_of(ClientTimings, "client", text) == ClientTimings(restart=0.5)


def test_no_wait_of_one_half_is_named_as_one_of_the_other() -> None:
    assert not vars(Timings()).keys() & vars(ClientTimings()).keys()


@for_each("text", ["node.max_runtime=5", "node.silence", "silence=5", "node.silence=soon"])
def test_no_limit_of_a_job_and_no_nonsense_is_taken(text: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        timings_of(Timings, "node", text)
