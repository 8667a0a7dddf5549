"""The version, alone in a file so that nothing has to be imported to read it."""

__version__ = "0.1.0"
