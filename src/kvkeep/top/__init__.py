"""Live numbers of running caches: ``kvkeep top``.

Start with :mod:`kvkeep.top.rates` (all numbers of one worker at one moment),
:mod:`kvkeep.top.sources` (where they come from) and :mod:`kvkeep.top.rates` (what happened between
two of them). Nothing here asks more than an engine's own scheduler does.
"""
