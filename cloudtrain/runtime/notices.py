"""Ask each of the sources in `Site.notices` every second, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["watch"]

SECONDS = 1.0
"""Pause between two questions: Azure gives 30 s from the notice to the end."""
SELDOM_SECONDS = 60.0
"""Longest pause for a source that has never answered: this platform has none."""

Look = Callable[[], "str | None"]


def watch(look: Look, tell: Callable[[str], None]) -> None:
    """Start to ask ``look``, and call ``tell`` with its answer whenever that changes.

    An answer gives the reason why this node is about to be taken away; it is empty if the node is not. None is no
    answer: the one before still holds. The thread ends with the process.
    """
    threading.Thread(target=_ask, args=(look, tell), name="notices", daemon=True).start()


def _ask(look: Look, tell: Callable[[str], None]) -> None:
    said, pause, answered = "", SECONDS, False
    while True:
        answer = look()
        if answer is not None:
            pause, answered = SECONDS, True
            if answer != said:
                said = answer
                tell(answer)
        elif not answered:
            pause = min(2 * pause, SELDOM_SECONDS)
        time.sleep(pause)
