"""A Kubernetes cluster faked at the wire: an API server on the loopback, and a Job controller with containers as pods.

Its words and states are those of a real 1.36.2.
"""
