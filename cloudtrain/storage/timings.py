"""Every wait of the client and of a local run's supervisor, in one value. It lies in the lowest package that waits.

Tests shorten it by ``CLOUDTRAIN_TEST_TIMINGS="client.restart=0.1"``, as they do those of a node
(`cloudtrain.runtime.timings`). What a platform's API asks for stands with its provider.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..validate import TEST_TIMINGS, timings_of


@dataclass(kw_only=True)
class ClientTimings:
    """Seconds of each wait of the client."""

    # stores
    http_silence: float = 60.0
    """Longest silence of an object store."""
    http_sending: float = 600.0
    """Time limit to send a body of `PIECE` bytes."""
    sftp_silence: float = 60.0
    """Without data from an SFTP server before its connection counts as lost."""
    sftp_keepalive: float = 30.0
    """Between keepalives of an idle SFTP connection; firewalls drop idle connections after some minutes."""
    credentials_age: float = 30.0
    """Age from which a refused client is made again: fresh credentials are not read twice."""
    lease: float = 300.0
    """For which a lease counts after its last renewal."""
    lease_ended: float = 1.0
    """For which the lease of a process of this machine that has ended counts: a request may still arrive."""
    lease_given_up: float = 10.0
    """Most time for which a lease that this process has given up counts: it knows that its own call has ended."""
    lease_pauses: tuple[float, ...] = (0.1, 2.0)
    """Between two looks at a lease, growing."""
    half_record: float = 0.5
    """Before an incomplete record is read again: its node may be writing it."""
    copy_save: float = 20.0
    """Between two saves of the digests, and two looks for a run.json that another client has written."""

    # code and files of this machine
    digest_settled: float = 60.0
    """Between a file's last change and its reading, after which a further change shows in its times. This covers
    another machine's clock that is off by less."""
    digest_unchanged: float = 60.0
    """For which the same times must have been seen before a reading. A write through a mapping changes them only at the
    first store, until the system writes the page back half a minute later."""
    git: float = 120.0
    """Longest call of git; a work tree on a slow network disk takes long."""
    provenance: float = 1.0
    """For the answer about the caller once all else is done; without one the record has null."""

    # runs
    platform: float = 60.0
    """For which a call is repeated if a platform throttles it or does not answer."""
    platform_pause: float = 10.0
    """Longest pause between two of these calls."""
    first_poll: float = 0.1
    """Before the second look at a run; the pause grows."""
    segments: float = 5.0
    """Between two looks at the segments while they replace the platform's log; nodes write one every 5 s or more."""
    unsent: float = 60.0
    """From recording an attempt to sending it; as long as `platform`."""
    sending: float = 300.0
    """For a silent client that may be sending: `platform` is 60 s, and one call takes minutes."""
    next_attempt: float = 120.0
    """For which a read-only client waits for another client to start the next attempt."""
    cancel_again: float = 60.0
    """For a cancelled attempt to end before it is cancelled again."""
    arrival: float = 5.0
    """For a request on its way to become a job; a local supervisor takes one or two to start."""
    native_page: float = 10.0
    """For the platform to give the address of its own page, in a report."""
    pull_look: float = 5.0
    """Between two looks at an unfinished run."""
    pull_silence: float = 600.0
    """Without an answer before contact with a platform, or a remote store, counts as lost."""
    pull_other: float = 60.0
    """Longest wait of a pull for another one that fills the same folder."""
    pull_save: float = 2.0
    """After which what has come is written down, for a pull that is killed."""

    # nodes on this machine
    supervisor_start: float = 60.0
    """Longest start of a supervisor."""
    torch_check: float = 120.0
    """Longest import of torch, for doctor."""
    docker_call: float = 120.0
    """Longest silence of a container engine in a call."""
    docker_silence: float = 600.0
    """Longest wait for an engine that does not answer."""
    forward: float = 10.0
    """For which a connection waits for a target that does not listen yet."""
    stop_grace: float = 40.0
    """Between SIGTERM and SIGKILL of a node: 30 for the script, as Kubernetes and Azure give, the rest to mirror its
    work."""
    stop_again: float = 1.0
    """Between stop signals to a node: a Python that has just started has no handler yet."""
    orphans: float = 20.0
    """So much longer than `stop_grace` nodes without a supervisor have to end, for a slow disk."""
    restart: float = 1.0
    """Between the end of all nodes and their next start."""
    node_look: float = 0.1
    """Between two looks of the supervisor at its nodes."""
    heartbeat: float = 5.0
    """Between two of its writes of status.json."""
    folder_sync: float = 0.3
    """Between two copies of a node's folder, as a platform's agent makes them."""
    store_sync: float = 5.0
    """Between two copies of ``live/`` to a remote store."""
    opening: float = 2.0
    """Before the client says that it still connects to a store, or looks for its credentials."""
    store_silence: float = 1800.0
    """For which a remote store may be away before a finished run gives up on it."""
    local_store_silence: float = 10.0
    """The same for a local store, at least, once the time limit is used up."""
    finish: float = 600.0
    """For the other nodes to end by themselves once one has failed."""
    finish_lost: float = 15.0
    """The same once a peer has missed one of them."""
    finish_unmet: float = 3.0
    """The same before the nodes have met: they would wait for it in vain."""
    lock: float = 10.0
    """For clients that look at a killed supervisor to release its lock."""


CLIENT_TIMINGS = timings_of(ClientTimings, "client", os.environ.get(TEST_TIMINGS, ""))
