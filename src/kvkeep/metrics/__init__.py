"""Metrics: what kvkeep counts, under documented names, in Prometheus form.

``catalogue.py`` says what there is, ``registry.py`` counts, ``endpoint.py`` shows it to who asks.
"""

from kvkeep.metrics.registry import LOAD, POOL_TIER, STORE, Metrics

__all__ = ["LOAD", "POOL_TIER", "STORE", "Metrics"]
