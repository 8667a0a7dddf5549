"""Azure ML on loopback, for tests: a control plane over TLS for the real clients, which really runs their jobs.

* `strict`: the service's refusals, from azure-ai-ml's own models read strictly and from rules that are in no model.
* `wire`: the server, with its own certificate, an identity that issues tokens, and faults on demand.
* `plane`: a workspace: jobs, environments, computes, datastores, codes, run history, quotas, capacity.
* `life`: one job through its statuses, its nodes as containers.
* `hosts`: the platform's part of a node, by its pages; `blobs`: bytes to and from the storage account.
* `world`: all of it as a FakePlatform of the contract suite.

Azurite serves the blobs. Jobs need docker: an environment's image is an image of this machine's engine. Facts that the
service does not document (how it stops a container, its messages) are marked unverified. ::

    with Plane(folder, azurite="DefaultEndpointsProtocol=...") as plane:
        os.environ.update(plane.environ())
        client = MLClient(DefaultAzureCredential(), *plane.scope, cloud=plane.cloud, cloud_metadata=plane.metadata)
        client.jobs.create_or_update(command(...))
        plane.job("my-job").preempt()  # low priority: its nodes are taken back
        assert plane.job("my-job").wait() == "Failed"
"""
