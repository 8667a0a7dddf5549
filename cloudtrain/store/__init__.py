"""Keep the run folder: its layout, its records, and what is staged for a run.

* `store`: layout, staging and records. `checkpoint`: complete checkpoints. `runtime_zip`: ``cloudtrain.pyz``.
* `copies`: inputs and checkpoints that nodes cannot read. `staging`: data for many runs. `gc`: what no run needs.
"""
