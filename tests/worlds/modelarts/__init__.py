"""ModelArts on loopback, for tests: the APIs that Huawei's own clients talk to, and jobs that really run.

* `bucket`: OBS on a folder, which is what a mounted volume is on a node.
* `plane`: a project: its jobs, quotas and agency, and IAM.
* `life`: one job through its phases, its tasks as containers of uid 1000.
* `world`: all of it as a FakePlatform of the contract suite.

Needs docker where jobs run. ``HUAWEI_FOLDER`` names the folder of the SDK (``make test`` makes it); without it answers
are not checked by its models. What the service documents nowhere is marked unverified where it stands.
"""
