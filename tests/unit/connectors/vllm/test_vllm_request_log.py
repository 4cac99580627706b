"""The log that a vLLM server writes of its requests is a workload for ``kvkeep replay``."""

from __future__ import annotations

import logging

from vllm.entrypoints.serve.utils import request_logger

from kvkeep.replay.trace import read_workload


def test_what_vllm_s_own_logger_writes_is_read(tmp_path, monkeypatch):
    """The real class, so that a change of its words is noticed."""
    path = tmp_path / "log"
    handler = logging.FileHandler(path)
    monkeypatch.setattr(request_logger.logger, "handlers", [handler])
    monkeypatch.setattr(request_logger.logger, "propagate", False)
    monkeypatch.setattr(request_logger.logger, "level", logging.DEBUG)
    request_logger.logger.manager._clear_cache()
    try:
        writer = request_logger.RequestLogger(max_log_len=None)
        writer.log_inputs("cmpl-1", 'it\'s\n"so"', list(range(10)), None, None, None)
        writer.log_inputs("cmpl-2", None, list(range(11)), None, None, None)
    finally:
        handler.close()
        request_logger.logger.manager._clear_cache()
    trace = read_workload(path, chunk_tokens=4)
    assert [request.num_tokens for request in trace.requests] == [10, 11]
