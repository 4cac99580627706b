"""What kvkeep says under vLLM is shown where vLLM's own log is."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("vllm")

from kvkeep.connectors.vllm.connector import share_log
from kvkeep.logs import json_logs


@contextmanager
def shown() -> Iterator[io.StringIO]:
    """What vLLM's handler writes, in a process whose root logger has none."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in (None, "vllm", "kvkeep")]
    before = [(one.handlers, one.level) for one in loggers]
    for one, handlers in zip(loggers, ([], [handler], []), strict=True):
        one.handlers = handlers
    loggers[1].setLevel(logging.INFO)
    try:
        yield text
    finally:
        for one, (one.handlers, level) in zip(loggers, before, strict=True):
            one.setLevel(level)


def test_what_the_core_says_stands_in_vllms_log_once():
    with shown() as text:
        share_log()
        share_log()
        logging.getLogger("kvkeep.engine.build").info("pool: 5 GB")
        logging.getLogger("kvkeep.engine.build").debug("no word of this")
    assert text.getvalue() == "INFO pool: 5 GB\n"


def test_a_log_that_is_shown_already_is_left_alone():
    with shown():
        own = logging.NullHandler()
        logging.getLogger("kvkeep").addHandler(own)
        share_log()
        assert logging.getLogger("kvkeep").handlers == [own]
        assert logging.getLogger("kvkeep").level == logging.NOTSET


def test_json_lines_stand_alone(capsys):
    with shown() as text:
        share_log()
        with json_logs():
            logging.getLogger("kvkeep.engine.build").warning("as JSON")
            logging.getLogger("vllm.kvkeep.connectors").warning("this, too")
        logging.getLogger("kvkeep.engine.build").warning("as text again")
    assert text.getvalue() == "WARNING as text again\n"
    assert len(capsys.readouterr().err.splitlines()) == 2
