"""Keep the run folder: its layout, its records, and what is staged for a run.

* `store`: layout, staging and records. `checkpoint`: complete checkpoints. `runtime_zip`: ``cloudtrain.pyz``.
* `remote_inputs`, `resume_copy`: copies of inputs and checkpoints that nodes cannot read. `gc`: what no run needs.
"""
