"""Every wait of a node, in one value. Tests shorten it by ``CLOUDTRAIN_TEST_TIMINGS="node.silence=12"``.

The variable is for the tests alone: it reaches all that a process starts on this machine, and no node of a cloud. No
limit of a job is among these waits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..validate import TEST_TIMINGS, timings_of


@dataclass(kw_only=True)
class Timings:
    """Seconds of each wait of a node."""

    # link
    handshake: float = 10.0  # longest silence of another node during the handshake
    silence: float = 90.0  # without even a ping, before a peer counts as lost; a cut network often heals sooner
    ping: float = 5.0  # between two pings: a silence holds several
    leave: float = 2.0  # longest wait of node 0 for its peers to close the link first, which keeps its last message

    # end of a node
    stop_term: float = 0.5  # from a failure anywhere to the SIGTERM of the healthy ranks
    stop_kill: float = 3.0  # from the same failure to their SIGKILL
    closing: float = 2.0
    """Longest time from a bad exit to torchrun stopping the others. A rank that ended earlier may have ended well."""
    reserve: float = 15.0  # longest part of the platform's grace that is kept for stopping ranks and mirroring
    launcher: float = 2.0  # for torchrun to report each exit code after its ranks' end; for pip to end after its kill
    pipes: float = 2.0  # for the last lines of ranks after the launcher's end: a grandchild may keep a pipe open
    mirror_failed: float = 15.0  # longest time without any progress of the mirror after a failure
    mirror_clean: float = 900.0  # the same after a clean end: the results are all that the machine was for
    meet: float = 3.0  # longest wait of two nodes that had not met before a notice, to leave together
    hold_slack: float = 5.0  # the other nodes wait so much longer than node 0, for its word
    withdrawn: float = 120.0
    """A rank that ends so soon after a notice was withdrawn may have got it: that is a preemption, not a success."""
    peers: float = 60.0  # longest wait of node 0 for its peers' last messages, after a failure
    node_0: float = 120.0  # longest wait of the others for node 0's last message, after a failure
    last_uploads: float = 60.0  # longest time for a node to upload its last files itself, if the platform does not sync
    record: float = 40.0
    """Longest wait for a store that takes the last lines and the exit record: a mount may hang. With `mirror_failed` it
    is less than `peers`."""
    record_least: float = 2.0  # the same if the grace is over or the store already hangs
    notice_look: float = 1.0  # between two questions for a notice: Azure gives 30 s from the notice to the end
    notice_seldom: float = 60.0  # longest pause for a source that has never answered: this platform has none

    webhook: float = 12.0  # for which node 0 stays for the job's webhook, at the very end
    webhook_answer: float = 4.0  # longest silence of a webhook
    webhook_pauses: tuple[float, ...] = (1.0,)  # before a webhook that failed is tried again

    # start of a node
    gpu_check: float = 120.0  # for PyTorch to use the GPUs: it may come over the network when an image is pulled lazily
    node_check_begin: float = 110.0  # for each process of `node_check` to use its GPU; the others wait a little longer
    node_check: float = 400.0  # for all of the check
    store_list: float = 120.0  # longest listing of the store for checkpoints that a script writes there itself
    store_pauses: tuple[float, ...] = (1.0, 3.0)  # before a store that did not answer is asked again
    store_silent: float = 300.0  # for which a silent store is asked if it may hold all there is
    store_again: float = 15.0  # between two of these questions
    first_step_look: float = 1.0  # between two looks for the first metrics row after a resume
    http_pauses: tuple[float, ...] = (0.5, 2.0, 5.0)  # before each further try after throttling or a service's failure
    http_answer: float = 10.0  # longest silence of a service

    # checkpoints
    quiet: float = 2.0  # a checkpoint is finished if nothing changed for so long and no process has it open for writing
    forerunner: float = 60.0
    """Longest time without a change for a checkpoint that lacks files of the one before. Then it is finished."""
    mixed: float = 300.0  # longest time for one written over the one before to hold files of both. Then it is finished
    restless: float = 5.0  # a file that is never `quiet` is taken between two writes after so long
    breath: float = 0.2
    """If two looks so far apart find such a file closed and unchanged, it is between two writes. The pause is long
    enough to hear that its writer has died."""
    breath_unseen: float = 0.5  # the same without /proc, which shows the files that a process has open
    copy_pauses: tuple[float, ...] = (0.5, 2.0, 5.0)
    """Before a failed copy is tried again: a mount's hiccup must not cost the whole checkpoint."""
    mount: float = 60.0
    """For which a disk or mount that fails is asked for the newest checkpoint, before the attempt fails. So does an
    attempt whose folder in the store does not answer for so long."""
    mount_older: float = 5.0  # the same if only older checkpoints cannot be read, before they are skipped
    mount_pauses: tuple[float, ...] = (0.5, 8.0)  # between two of these tries, growing
    scan: float = 0.5  # between two looks of the mirror at the checkpoints
    frozen: float = 10.0  # after a rank's death that is not taken for a failure, nothing counts as finished for so long
    progress: float = 5.0  # between two messages to the other nodes that this one's copies move
    archive_clean: float = 60.0  # longest wait for moves to the archive after a clean end; the rest stay where they are
    archive_failed: float = 10.0  # the same after a failure
    holder: float = 300.0
    """Longest wait for a node that held a part of the last checkpoint. After that its part of the version before counts
    as its part of this one."""
    first_holder: float = 10.0  # the same for the first checkpoint of a script, when it is unknown which nodes write
    hold_answer: float = 30.0  # a node's answer about its part that has not come by then is lost: node 0 asks again
    commit_retry: float = 1.0  # before a failed commit is tried again; the pause doubles
    commit_retry_most: float = 10.0  # the longest of these pauses

    # other files
    growing: float = 30.0  # between two copies of a growing file
    file_retry: float = 1.0  # before a file that could not be copied is tried again
    output_young: float = 2.0
    """A file that changed so short a time ago may be half written. Then the first look leaves it for the next."""
    output_look: float = 10.0
    """Between two looks at outputs; every second one copies a file that is always being written."""
    outputs_end: float = 600.0  # for outputs after the script's end: results must not keep machines that cost money
    agent_look: float = 1.0  # between two looks at what a platform's agent has uploaded
    agent_dead: float = 240.0  # an agent that has uploaded nothing of a checkpoint for so long has stopped
    agent_give_up: float = 120.0  # longest wait for files after the script's end, while the agent is dead
    upload_retry: float = 20.0  # before a failed upload is tried again
    upload_sweep: float = 30.0  # between two looks for other files of the node's own to upload, while the agent is dead
    log_retry: float = 5.0  # after a segment that could not be written
    log_room: float = 5.0  # longest wait of a rank with many lines for a store that is slow to take them
    redraw: float = 1.0  # between two states of a progress bar that are kept: it redraws its line with carriage returns

    usage: float = 15.0  # between two samples of how busy the node is

    # hangs
    alive: float = 5.0  # least time between two messages about signs of life; a quarter of a short limit
    alive_late: float = 1.0  # longest delay of a sign of life on its way to node 0
    stall_look: float = 2.5  # for the look at a node's ranks, once they hang
    stacks: float = 3.0  # longest wait of a node for its ranks' stacks and dumps, and of node 0 for all nodes' answers
    dump_settled: float = 0.3  # a dump of NCCL that has not changed for so long is whole


TIMINGS = timings_of(Timings, "node", os.environ.get(TEST_TIMINGS, ""))
