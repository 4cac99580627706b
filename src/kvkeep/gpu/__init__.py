"""GPUConnectors: between an engine's KV caches and memory objects. ``base.py`` is the contract."""
