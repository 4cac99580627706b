"""Spans of lookups, loads and stores: with the request's id, and none unless asked for."""

from __future__ import annotations

import builtins

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvkeep.errors import MissingExtraError, TokenError
from kvkeep.metrics.spans import NO_SPANS, open_spans
from support.engine_rig import EngineRig


@pytest.fixture
def exporter(monkeypatch):
    """What the process's OpenTelemetry was sent."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


@pytest.fixture
def rig(exporter):
    with EngineRig() as rig:
        rig.metrics.spans = open_spans()
        yield rig


TOKENS = list(range(40))  # five chunks


def ended(exporter: InMemorySpanExporter) -> list[tuple[str, dict]]:
    spans = exporter.get_finished_spans()
    exporter.clear()
    return [(span.name, dict(span.attributes or {})) for span in spans]


def args(rig: EngineRig, num_tokens: int) -> dict:
    pages = range(rig.model.num_pages_for(num_tokens))
    rig.model.prefill(TOKENS[:num_tokens], pages)
    return {
        "kvcaches": rig.model.caches,
        "slot_mapping": rig.model.slots(pages, num_tokens),
    }


def test_each_verb_is_one_span_with_the_requests_id(rig, exporter):
    rig.engine.store(TOKENS[:24], req_id="r-1", **args(rig, 24))
    chunk_bytes = rig.model.layout.chunk_bytes(8)
    assert ended(exporter) == [
        (
            "kvkeep.store",
            {
                "kvkeep.request_id": "r-1",
                "kvkeep.tokens": 24,
                "kvkeep.tokens_stored": 24,
                "kvkeep.bytes": 3 * chunk_bytes,
            },
        )
    ]
    rig.engine.lookup(TOKENS, lookup_id="r-2", pin=True)
    rig.engine.retrieve(TOKENS, req_id="r-2", **args(rig, 40))
    found = {"kvkeep.request_id": "r-2", "kvkeep.tokens": 40, "kvkeep.tokens_found": 24}
    assert ended(exporter) == [
        ("kvkeep.lookup", {**found, "kvkeep.tiers": ("LocalCPUBackend",)}),
        (
            "kvkeep.load",
            {
                **found,
                "kvkeep.tokens_loaded": 24,
                "kvkeep.bytes": 3 * chunk_bytes,
                "kvkeep.tiers": ("LocalCPUBackend",),
            },
        ),
    ]


def test_layer_by_layer_is_one_span_too_also_when_it_is_dropped(rig, exporter):
    storing = rig.engine.store_layer(TOKENS[:16], req_id="r-1", **args(rig, 16))
    next(storing)
    assert ended(exporter) == []
    for _ in storing:
        pass
    loading = rig.engine.retrieve_layer(TOKENS[:16], req_id="r-2", **args(rig, 16))
    next(loading)
    next(loading)
    loading.close()
    assert [(name, span["kvkeep.request_id"]) for name, span in ended(exporter)] == [
        ("kvkeep.store", "r-1"),
        ("kvkeep.load", "r-2"),
    ]


def test_a_verb_that_raises_is_a_failed_span(rig, exporter):
    rig.fill(TOKENS)
    exporter.clear()
    with pytest.raises(ValueError, match="slot"):
        rig.engine.retrieve(
            TOKENS,
            req_id="r-1",
            kvcaches=rig.model.caches,
            slot_mapping=args(rig, 8)["slot_mapping"],
        )
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    exporter.clear()
    with pytest.raises(TokenError):
        rig.engine.store([-1], req_id="r-2", **args(rig, 8))
    assert ended(exporter) == []  # it was no request


def test_a_span_is_the_child_of_the_callers(rig, exporter):
    tracer = trace.get_tracer("application")
    with tracer.start_as_current_span("request") as parent:
        rig.engine.lookup(TOKENS)
    child, outer = exporter.get_finished_spans()
    assert (child.name, outer.name) == ("kvkeep.lookup", "request")
    assert child.parent.span_id == parent.get_span_context().span_id


def test_without_the_setting_there_are_none(exporter):
    with EngineRig() as rig:
        assert rig.metrics.spans is NO_SPANS
        rig.fill(TOKENS)
        rig.engine.lookup(TOKENS)
    assert ended(exporter) == []


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"kvkeep\[otel\]"):
        open_spans()
