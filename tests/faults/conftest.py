"""What the tests of stores that fail share."""

from __future__ import annotations

import pytest

from kvkeep.metrics import Metrics
from support.remote_requests import Requests


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def requests_over(metrics):
    """Makes requests over a store; they are closed at the end."""
    opened = []

    def make(url, **options):
        opened.append(Requests(url, metrics, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
