"""How fast the parts are, each beside what this machine can do, as ratios within one run.

``kvkeep bench`` shows the short form, ``benchmarks/run.py`` the long one. Start with
:mod:`kvkeep.bench.measure` (how it is measured) and :mod:`kvkeep.bench.rig` (what is measured).
"""
