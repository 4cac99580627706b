"""The codecs of a worker's tiers, from the settings, and what they add to its identity.

Called by CacheManager before the first key is made, and by connectors that check settings early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvkeep.codec.base import Codec
from kvkeep.codec.names import choose_codec
from kvkeep.config import Settings
from kvkeep.identity import CacheIdentity
from kvkeep.layout import KVLayout

#: Name of the identity's tag for a tier whose codec is lossy, followed by the tier's settings.
TAG = "kvkeep.codec."


def open_codecs(settings: Settings, layout: KVLayout, element: str | None) -> dict[str, Codec]:
    """The codec of each tier that has one, by the name of its group of settings.

    Args:
        settings: all settings.
        layout: of the engine's KV.
        element: element type of opaque pages; None if it is unknown.

    Raises:
        ConfigError: a codec cannot encode this engine's KV; says which can.
    """
    names = {"disk": settings.disk.codec, "remote": settings.remote.codec}
    return {
        tier: choose_codec(name, layout, element=element, setting=f"{tier}.codec")
        for tier, name in names.items()
    }


def with_codecs(identity: CacheIdentity, codecs: Mapping[str, Codec]) -> CacheIdentity:
    """The identity of what an engine with these codecs keeps.

    KV that went through a lossy codec is not what the model computed. So its keys are others, and
    no engine without that codec in that tier finds it, in no tier.

    Raises:
        IdentityError: the settings give a tag of such a name by hand.
    """
    tags = tuple((TAG + tier, codec.name) for tier, codec in codecs.items() if codec.lossy)
    return replace(identity, tags=tuple(sorted(identity.tags + tags))) if tags else identity
