"""ModelArts on loopback, for tests: the APIs that Huawei's own clients call, and jobs that really run.

* `bucket`: OBS on a folder, which a node mounts as a volume.
* `plane`: a project: its jobs, quotas and agency, and IAM.
* `life`: one job through its phases, its tasks as containers of uid 1000.
* `world`: all of it as a FakePlatform of the contract suite.

Jobs need docker. ``HUAWEI_FOLDER`` names the folder of the SDK, which ``make test`` makes: its models check the
answers. Facts that the service does not document are marked unverified.
"""
