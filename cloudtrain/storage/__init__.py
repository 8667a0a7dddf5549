"""Read and write the bytes of one URL: a folder of this machine, an object store, or any URL that fsspec knows.

* `files`: the interface and the local folder; `remote`: the same for every other URL.
* `obstore_backend`, `fsspec_backend`: move the bytes of S3 and Azure, and of every other URL. `obstore_config`,
  `fsspec_pool`: their clients.
* `errors`: the classes of a client library's errors, and trying again. `lease`: one client at a time.
* `local_disk`: URLs, safe names, whole files. `digest_cache`: SHA-256 of local files. `replace_folder`: atomic folders.
* `extras`: the optional packages that are missing.
"""
