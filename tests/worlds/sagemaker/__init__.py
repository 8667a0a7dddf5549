"""SageMaker on loopback, for tests: a control plane for real boto3, which really runs its jobs.

* `strict`: the service's refusals, from botocore's model read strictly and from rules that are in no model.
* `wire`: the server that speaks JSON 1.1, with faults on demand.
* `plane`: the operations on training jobs, and the account's roles, quotas and capacity.
* `life`: one training job through its statuses, its instances as containers.
* `instances`: the platform's part of an instance, and its bytes to and from S3.
* `cloudwatch`: CloudWatch Logs, because moto ignores the prefix of a stream's name.
* `secrets`: a role's credentials and its secrets, as a container gets them.
* `world`: all of it as a FakePlatform of the contract suite.

moto serves S3, IAM and STS. Jobs need docker: the image
``123456789012.dkr.ecr.eu-west-1.amazonaws.com/NAME:TAG`` is ``NAME:TAG`` of this machine's engine. ::

    with Plane(folder, moto="http://127.0.0.1:5000") as plane:
        os.environ.update(plane.environ())
        role, bucket = plane.make_role("training"), plane.make_bucket("mine")
        boto3.client("sagemaker").create_training_job(RoleArn=role, ...)
        plane.job("my-job").interrupt()  # spot takes its instances back
        assert plane.job("my-job").wait()["TrainingJobStatus"] == "Completed"
"""
