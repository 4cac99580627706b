"""The cache for ``model.generate`` of transformers.

In use::

    from kvkeep.connectors.hf import attach

    with attach(model) as kept:
        kept.generate(**inputs, max_new_tokens=100)

Prompts that begin like an earlier one are not computed again from their start. ``wrapper.py`` is
what a person uses; ``caches.py`` knows transformers' caches, ``arguments.py`` what generate was
asked for.
"""

from kvkeep.connectors.hf.caches import CallReport, RowReport
from kvkeep.connectors.hf.wrapper import KVKeepModel, attach

__all__ = ["CallReport", "KVKeepModel", "RowReport", "attach"]
