"""What this machine and these settings can do, and what to change: ``kvkeep doctor``.

Start with :mod:`kvkeep.doctor.base` (what a probe finds) and :mod:`kvkeep.doctor.examination`
(which probes there are, and how they are run). A probe changes nothing that lasts.
"""
