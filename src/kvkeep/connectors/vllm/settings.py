"""kvkeep's settings as a vLLM engine gives them, and what follows from the engine's block size.

Called once in the scheduler's process and once per worker; both arrive at the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.config import Settings, resolve_settings
from kvkeep.errors import ConfigError
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.lookup.paths import socket_directory, socket_path
from kvkeep.memory.dtypes import dtype_name
from kvkeep.opening_codecs import open_codecs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def engine_settings(
    extra_config: Mapping[str, object], env: Mapping[str, str], *, block_size: int
) -> Settings:
    """The settings, with a chunk size that is a whole number of blocks.

    Args:
        extra_config: vLLM's ``kv_connector_extra_config``.
        env: environment variables.
        block_size: tokens in a block of the engine.

    Raises:
        ConfigError: a setting is wrong, or the chunk size that was asked for is no whole number of
            blocks. The default one is rounded up instead.
    """
    loaded = resolve_settings(env=env, extra=extra_config)
    settings = loaded.settings
    rest = settings.chunk_size % block_size
    if rest == 0:
        return settings
    fitting = settings.chunk_size - rest + block_size
    if "chunk_size" in loaded.origins:
        raise ConfigError(
            f"chunk_size = {settings.chunk_size} ({loaded.origins['chunk_size']}) is no multiple "
            f"of the engine's block size {block_size}; {fitting} is"
        )
    return settings.model_copy(update={"chunk_size": fitting})


def check_codecs(settings: Settings, kv_cache_config: KVCacheConfig) -> None:
    """Refuse codecs that cannot encode pages of this engine, before it starts.

    Raises:
        ConfigError: a tier's codec cannot; says which can.
    """
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    group = GroupLayout("full", 1, spec.real_page_size_bytes)
    pages = KVLayout(
        MemoryFormat.OPAQUE_PAGES, "uint8", spec.block_size, (group,), 0, 0, engine="vllm"
    )
    open_codecs(settings, pages, dtype_name(spec.dtype))


def socket_paths(
    settings: Settings, env: Mapping[str, str], *, engine_id: str, world_size: int
) -> list[Path]:
    """The lookup socket of each rank.

    Raises:
        LookupServiceError: the paths are too long.
    """
    directory = socket_directory(settings.lookup.socket_dir, env)
    return [socket_path(directory, engine_id, rank) for rank in range(world_size)]
