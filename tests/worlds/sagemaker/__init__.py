"""SageMaker on loopback, for tests: a control plane that real boto3 talks to, and that really runs what it is sent.

* `strict`: what the service refuses, from botocore's model read strictly and the rules that stand in no model.
* `wire`: the server that speaks JSON 1.1, with faults on demand.
* `plane`: the operations on training jobs, and the accounts' side of them (roles, quotas, capacity).
* `life`: one training job through the status machine, its instances as containers.
* `instances`: what the platform puts on an instance, and its bytes to and from S3.
* `cloudwatch`: CloudWatch Logs, because the usual stand-in lets a prefix through that nobody asked for.
* `secrets`: a role's credentials and its secrets, as a container reaches them.
* `world`: all of it as a World of the contract suite.

S3, IAM and STS are somebody else's server (moto). Needs boto3, and docker where jobs run: the image
``123456789012.dkr.ecr.eu-west-1.amazonaws.com/NAME:TAG`` is ``NAME:TAG`` of this machine's engine. ::

    with Plane(folder, moto="http://127.0.0.1:5000") as plane:
        os.environ.update(plane.environ())
        role, bucket = plane.make_role("training"), plane.make_bucket("mine")
        boto3.client("sagemaker").create_training_job(RoleArn=role, ...)
        plane.job("my-job").interrupt()  # spot takes its instances back
        assert plane.job("my-job").wait()["TrainingJobStatus"] == "Completed"
"""
