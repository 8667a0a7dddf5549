"""Run a job: plan, submit, follow, retry, hand over, pull. The picture in docs/design.md names the modules."""
