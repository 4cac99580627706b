"""Which settings matter under one engine alone. Values and a pure function."""

from __future__ import annotations

from pydantic import BaseModel

from kvkeep.config.settings import Settings

#: Settings without effect under transformers: there is one process, one rank and no queue.
VLLM_ONLY = frozenset(
    {
        "cpu.first_rank_size",
        "lookup.socket_dir",
        "prefetch.enabled",
        "prefetch.timeout",
        "prefetch.memory",
        "load.asynchronous",
        "ranks.save_only_first_rank",
        "ranks.timeout",
    }
)


def given_for_vllm(settings: Settings) -> list[str]:
    """Settings that were given, wherever, and matter under vLLM alone."""
    found = []
    for name in sorted(VLLM_ONLY):
        *sections, last = name.split(".")
        place: BaseModel = settings
        for section in sections:
            place = getattr(place, section)
        if last in place.model_fields_set:
            found.append(name)
    return found
