"""JSON logs: kvkeep's log as one JSON object per line, where the settings ask for it.

kvkeep itself configures no logging: its loggers are ``kvkeep...`` and, in the connector for vLLM,
children of vLLM's, and what is done with them is the process's affair. ``json_logs`` changes that
while it is open. Callable from any thread.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Loggers that are kvkeep's; the second one is the connector's, below vLLM's own.
LOGGERS = ("kvkeep", "vllm.kvkeep")
#: What every record has; what it has besides was given as ``extra`` and becomes a field.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_lock = threading.Lock()
_open = 0  # guarded by _lock
_handler: logging.Handler | None = None  # guarded by _lock
#: Handlers, level and propagation that kvkeep's loggers had, for the end.
_before: dict[str, tuple[list[logging.Handler], int, bool]] = {}  # guarded by _lock


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, its extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        fields: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            "thread": record.threadName,
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """UTC with milliseconds, as RFC 3339 has it."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"


@contextmanager
def json_logs() -> Iterator[None]:
    """Until the last one that is open ends, kvkeep's log goes to standard error as JSON."""
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _open, _handler  # noqa: PLW0603  loggers are global, too
    with _lock:
        _open += 1
        if _open > 1:
            return
        _handler = logging.StreamHandler()
        _handler.setFormatter(JsonFormatter())
        for name in LOGGERS:
            logger = logging.getLogger(name)
            _before[name] = logger.handlers, logger.level, logger.propagate
            logger.handlers = [_handler]
            logger.propagate = False
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.INFO)


def _end() -> None:
    global _open, _handler  # noqa: PLW0603
    with _lock:
        _open -= 1
        if _open or _handler is None:
            return
        for name in LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers, level, logger.propagate = _before.pop(name)
            logger.setLevel(level)
        _handler.close()
        _handler = None
