"""Sweeps: searches over hyperparameters under one hard budget. Each trial is an ordinary run.

A sweep is a log of numbered entries in the store. A client that adds entry n has read entries 0 to n-1. So every
decision rests on a whole prefix of the log, and any number of clients can drive one sweep. They need no lock.
"""
