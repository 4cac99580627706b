"""The ranks of one engine on one machine: loads on which all of them agree, or nobody has them.

``base`` is what an engine sees, ``first`` and ``follower`` its two sides, ``messages`` and
``channel`` the wire, ``verdicts`` where a load's outcome is decided.
"""
