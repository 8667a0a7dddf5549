"""Vertex AI on loopback, for tests: the APIs that Google's own clients call, and jobs that really run.

* `strict`: the service's refusals, from the SDK's protobufs read strictly and from rules that are in no model.
* `wire`: the server, with tokens, the errors of Google's front ends, and faults on demand.
* `identity`: the callers: a service account's tokens, the metadata server of a node, secrets.
* `gcs`: the JSON API of Cloud Storage on a folder, which a node has at ``/gcs``.
* `entries`: Cloud Logging, with entries that come late, twice and out of order.
* `plane`: a project's custom jobs: quotas, capacity, permissions.
* `life`: one job through its states, its replicas as containers.
* `replicas`: the platform's part of a node, by its pages.
* `world`: all of it as a FakePlatform of the contract suite.

Needs google-cloud-aiplatform, google-auth and cryptography, gcsfs for a store, and docker for jobs: ``imageUri`` is an
image of this machine's engine. Facts that the service does not document are marked unverified. ::

    with Plane(folder) as plane:
        os.environ.update(plane.environ())
        client = JobServiceClient(client_options={"api_endpoint": plane.url}, transport="rest")
        made = client.create_custom_job(parent=plane.parent, custom_job=...)
        plane.job(made.name).preempt()  # SPOT: its nodes are taken back
        assert plane.job(made.name).wait() == "JOB_STATE_SUCCEEDED"
"""
