"""Run a job: plan, submit, follow, retry, hand over, pull.

* `submit`: from a Job to a Run. `run`: the handle. `attempts`: the rules for further attempts. `retry`, `max_wait`,
  `fallback`, `handover`: apply them.
* `outcome`: the result of a run. `cost`: what it has used. `metrics`: its metrics so far.
* `log_order`, `log_sources`: every log line once, in order. `pull`: results. `listing`, `reconcile`: many runs.
* `resume`: the checkpoint that a job names. `warnings`, `summary`: what a plan says.
"""
