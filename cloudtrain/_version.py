"""The version, in a file of its own: setuptools reads it without importing anything else."""

__version__ = "0.1.0"
