"""Read and write the bytes of one URL: a folder of this machine, an object store, or any URL that fsspec knows.

* `files`: the interface and the local folder; `remote`: the same for every other URL.
* `obstore_backend`, `fsspec_backend`: the two libraries that move bytes; `obstore_config`, `fsspec_pool`: clients.
* `errors`: the classes of a client library's errors, and trying again. `lease`: one client at a time.
* `local_disk`: URLs, safe names, whole files. `digest_cache`: SHA-256 of local files. `replace_folder`: atomic folders.
* `credential`, `extras`: credentials of a store; the optional packages that are missing.
"""
