"""The command line against the loopback Azure ML."""

from __future__ import annotations

from clients import PATIENCE, Client
from jobs import Jobs
from worlds.azureml.world import AzureMLWorld


class AzureClient(Client):
    """A client whose cloudtrain.toml holds the workspace, as a user's own does."""

    world: AzureMLWorld

    def __init__(self, world: AzureMLWorld, jobs: Jobs) -> None:
        super().__init__(world, jobs, "--image", world.image)
        settings, metadata = dict(world.settings), world.settings["cloud_metadata"]
        del settings["cloud_metadata"]
        lines = ["[azureml]", *(f'{key} = "{value}"' for key, value in settings.items())]
        lines += ["[azureml.cloud_metadata]", *(f'{key} = "{value}"' for key, value in metadata.items())]
        (jobs.tmp / "cloudtrain.toml").write_text("\n".join(lines) + "\n")

    def until(self, run_id: str, text: str, attempt: int = 0) -> None:
        """Wait until a log of the job has a line with ``text``."""
        job = self.job(run_id, attempt)
        Jobs.wait_for(lambda: job.over or text in job.printed(), PATIENCE)
        assert not job.over, job.error
