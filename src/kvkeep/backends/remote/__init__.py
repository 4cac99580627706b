"""Parts of the remote tier (:mod:`kvkeep.backends.remote.backend`).

Start at ``base.py``: what a connector to a store promises. ``names.py`` finds one by its URL.
"""
