"""share_log: what kvkeep says below the connector appears where vLLM's own log does.

vLLM configures its logger alone, so what other loggers say is dropped, or shown bare without time
and level if it is a warning. Called by the connector in each of its processes, by one thread.
"""

from __future__ import annotations

import logging


def share_log() -> None:
    """Hand kvkeep's log to vLLM's handlers, unless somebody shows it already.

    Somebody is a handler of the logger ``kvkeep`` or of the root, as ``VLLM_LOGGING_CONFIG_PATH``
    or the program around vLLM may set. A second call does nothing.
    """
    ours, theirs = logging.getLogger("kvkeep"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())
