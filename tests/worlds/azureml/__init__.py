"""Azure ML on loopback, for tests: a control plane over TLS that the real clients talk to, and that really runs what it
is sent.

* `strict`: what the service refuses, from azure-ai-ml's own models read strictly and the rules that stand in no model.
* `wire`: the server, with a certificate of its own, an identity that gives tokens, and faults on demand.
* `plane`: a workspace: jobs, environments, computes, datastores, codes, run history, quotas, capacity.
* `life`: one job through the status machine, its nodes as containers.
* `hosts`: what the platform puts on a node, as its pages have it; `blobs`: bytes to and from the storage account.
* `world`: all of it as a World of the contract suite.

Blobs are somebody else's server (Azurite). Needs azure-ai-ml, and docker where jobs run: an environment's
image is an image of this machine's engine. What the service documents nowhere (how it stops a container, its texts) is
marked unverified where it stands. ::

    with Plane(folder, azurite="DefaultEndpointsProtocol=...") as plane:
        os.environ.update(plane.environ())
        client = MLClient(DefaultAzureCredential(), *plane.scope, cloud=plane.cloud, cloud_metadata=plane.metadata)
        client.jobs.create_or_update(command(...))
        plane.job("my-job").preempt()  # low priority: its nodes are taken back
        assert plane.job("my-job").wait() == "Failed"
"""
