"""Replay of recorded workloads: what would a pool of that size, with that policy, have found?

Start with :mod:`kvkeep.replay.trace` (the workload), :mod:`kvkeep.replay.sweep` (a tier without
bytes, through the real policies) and :mod:`kvkeep.replay.sweep` (the clairvoyant bound).
"""
