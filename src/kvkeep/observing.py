"""observe: what a worker shows of itself, from the settings: its metrics and the form of its log.

Called once per worker, by CacheManager. Settings end here; below are plain values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvkeep.config import Settings
from kvkeep.config.observing import parse_listen
from kvkeep.logs import json_logs
from kvkeep.memory.sizing import WorkerPlace
from kvkeep.metrics import Metrics
from kvkeep.metrics.endpoint import EndpointOptions, MetricsEndpoint, place_of_rank

_log = logging.getLogger(__name__)


@contextmanager
def observe(settings: Settings, place: WorkerPlace, metrics: Metrics) -> Iterator[None]:
    """Show what the settings ask for, until the end.

    An endpoint that cannot be opened (its port is taken, say) is logged and counted, and the cache
    works without it.
    """
    with ExitStack() as opened:
        if settings.log.format == "json":
            opened.enter_context(json_logs())
        endpoint = _open_endpoint(settings, place, metrics)
        if endpoint is not None:
            opened.callback(endpoint.close)
        yield


def _open_endpoint(
    settings: Settings, place: WorkerPlace, metrics: Metrics
) -> MetricsEndpoint | None:
    listen, token = settings.metrics.listen, settings.metrics.token
    cert, key = settings.metrics.tls_cert, settings.metrics.tls_key
    if listen is None:
        return None
    tls = (cert, key) if cert is not None and key is not None else None
    try:
        where = place_of_rank(parse_listen(listen), place.rank, place.num_ranks)
        endpoint = MetricsEndpoint(EndpointOptions(where, token, tls), metrics.exposition)
    except (OSError, ValueError) as error:
        metrics.failure("metrics", "listen", type(error).__name__)
        _log.warning(
            "metrics.listen = %s: nothing listens for rank %d: %s", listen, place.rank, error
        )
        return None
    _log.info("metrics of rank %d are at %s", place.rank, endpoint.place)
    return endpoint
