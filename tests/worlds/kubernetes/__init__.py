"""A Kubernetes cluster faked at the wire: an API server on loopback, and a Job controller with containers as pods.

Its messages and states are those of a real 1.36.2.
"""
