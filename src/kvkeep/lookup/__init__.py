"""Lookup service: the scheduler's process asks the workers' processes what is stored.

``messages`` is the wire, ``server`` answers inside a worker, ``client`` asks inside the scheduler.
"""
