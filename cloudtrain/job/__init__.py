"""Describe the work to run: a job, the files that ship with it, and where its code comes from. Pure.

* `job`: Job, Source, Input and Resources. `fields`: the checks of their values, with a JSON Schema each.
* `options`: native options, merged into a request.
* `bundle`: the files that ship, one digest, one archive; `shipped_files` lists them, `own_files` are cloudtrain's own.
* `entry_point`: the script that a job names. `provenance`: the commit and the CI run of its code.
"""
