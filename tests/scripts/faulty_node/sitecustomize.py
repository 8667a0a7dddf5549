"""On PYTHONPATH: makes the processes of `node_check` on the node in $FAULTY fail as with a broken GPU."""

import os
import sys

if any(word.endswith("node_check.py") for word in sys.orig_argv):
    here = (os.environ.get("SLURMD_NODENAME"), f"node {os.environ['GROUP_RANK']}")
    if os.environ.get("FAULTY") in here:
        sys.stderr.write("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n")
        sys.stderr.flush()
        os._exit(1)
