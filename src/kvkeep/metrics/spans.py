"""Spans: one OpenTelemetry span per lookup, load and store, where the settings ask for them.

kvkeep makes spans and sends nothing: where they go is what the process's OpenTelemetry SDK says. A
span that is started while another one is current in its thread becomes its child. Callable from any
thread; without spans a call costs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from kvkeep.errors import MissingExtraError

#: Name under which OpenTelemetry knows kvkeep.
SCOPE = "kvkeep"
#: Prefix of the attributes.
PREFIX = "kvkeep."

Attribute = int | float | str | list[str]


class Span(Protocol):
    """One verb at work. A context manager; leaving it by an exception marks the span as failed."""

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        """Say something about it, by names without the prefix."""

    def end(self, error: BaseException | None = None) -> None:
        """It is over; a second call does nothing."""

    def __enter__(self) -> Span: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Spans(Protocol):
    """What starts spans."""

    def start(self, verb: str, request_id: str | None) -> Span:
        """A span of a verb (``lookup``, ``load`` or ``store``) for a request."""


class _NoSpan:
    """Nothing at all."""

    def note(self, attributes: Mapping[str, Attribute]) -> None: ...

    def end(self, error: BaseException | None = None) -> None: ...

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class _NoSpans:
    """Starts nothing."""

    def start(self, verb: str, request_id: str | None) -> Span:
        return _NO_SPAN


_NO_SPAN = _NoSpan()
NO_SPANS: Spans = _NoSpans()


class _OTelSpan:
    """A span of OpenTelemetry."""

    def __init__(self, span: Any) -> None:
        self._span: Any = span  # None once it has ended

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        if self._span is not None:
            self._span.set_attributes({PREFIX + name: value for name, value in attributes.items()})

    def end(self, error: BaseException | None = None) -> None:
        span, self._span = self._span, None
        if span is None:
            return
        if isinstance(error, Exception):
            from opentelemetry.trace import StatusCode

            span.set_status(StatusCode.ERROR, type(error).__name__)
        span.end()

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)


class _OTelSpans:
    """Starts spans of OpenTelemetry."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def start(self, verb: str, request_id: str | None) -> Span:
        attributes = {} if request_id is None else {PREFIX + "request_id": request_id}
        return _OTelSpan(self._tracer.start_span(PREFIX + verb, attributes=attributes))


def open_spans() -> Spans:
    """Spans of the process's OpenTelemetry.

    Raises:
        MissingExtraError: its API is not installed.
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise MissingExtraError("tracing.spans", "otel") from error
    return _OTelSpans(trace.get_tracer(SCOPE))
