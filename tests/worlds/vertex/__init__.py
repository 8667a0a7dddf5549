"""Vertex AI on loopback, for tests: the APIs that Google's own clients talk to, and jobs that really run.

* `strict`: what the service refuses, from the SDK's protobufs read strictly and the rules that stand in no model.
* `wire`: the server, with tokens, errors as Google's front ends write them, and faults on demand.
* `identity`: who calls: a service account's tokens, the metadata server of a node, secrets.
* `gcs`: the JSON API of Cloud Storage on a folder, which is what ``/gcs`` is on a node.
* `entries`: Cloud Logging, with entries that come late, twice and out of order.
* `plane`: a project's custom jobs: quotas, capacity, permissions.
* `life`: one job through its states, its replicas as containers.
* `replicas`: what the platform puts on a node, as its pages have it.
* `world`: all of it as a World of the contract suite.

Needs google-cloud-aiplatform, google-auth and cryptography, gcsfs for a store, and docker where jobs run: ``imageUri``
is an image of this machine's engine. What the service documents nowhere is marked unverified where it stands. ::

    with Plane(folder) as plane:
        os.environ.update(plane.environ())
        client = JobServiceClient(client_options={"api_endpoint": plane.url}, transport="rest")
        made = client.create_custom_job(parent=plane.parent, custom_job=...)
        plane.job(made.name).preempt()  # SPOT: its nodes are taken back
        assert plane.job(made.name).wait() == "JOB_STATE_SUCCEEDED"
"""
