"""Read settings: the file, its profile, the environment and ``--set``.

* `settings`: Settings and their sources. `coerce`: the type of one value. `needs`: the settings that a provider lacks.
* `schema`: JSON Schema of job files and settings files.
"""
