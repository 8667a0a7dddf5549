"""Ask each of the sources in `NodeEnvironment.notices` every second, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .timings import TIMINGS


def watch(look: Callable[[], str | None], tell: Callable[[str], None]) -> None:
    """Start to ask ``look``, and call ``tell`` with its answer whenever that changes.

    An answer gives the reason why this node is about to be taken away; it is empty if the node is not. None is no
    answer: the one before still holds. The thread ends with the process.
    """
    threading.Thread(target=_ask, args=(look, tell), name="notices", daemon=True).start()


def _ask(look: Callable[[], str | None], tell: Callable[[str], None]) -> None:
    said, pause, answered = "", TIMINGS.notice_look, False
    while True:
        answer = look()
        if answer is not None:
            pause, answered = TIMINGS.notice_look, True
            if answer != said:
                said = answer
                tell(answer)
        elif not answered:
            pause = min(2 * pause, TIMINGS.notice_seldom)
        time.sleep(pause)
