"""Fake clouds: each platform imitated at the wire, so that the vendor's own client talks to it."""
