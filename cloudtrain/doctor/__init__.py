"""Check a job before it is sent.

* `doctor`: settings, a plan, the provider's checks, the store.
"""
