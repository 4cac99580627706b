"""Every exception that kvkeep raises, in one small tree.

Expected outcomes (a miss, no room, not yet) are values, not exceptions. What stands here is broken:
a wrong argument, a wrong setting, a backend that failed.

    KVKeepError
    ├── ConfigError(ValueError)      a setting is unknown, malformed or contradicts another one
    ├── IdentityError(ValueError)    a CacheIdentity is incomplete or malformed
    ├── TokenError(ValueError)       token ids are negative, too wide or of the wrong shape
    ├── MaskError(ValueError)        a mask is not "False... then True..." on a chunk border
    ├── LayoutError(ValueError)      a KV layout is unknown, unsupported or failed its self-test
    ├── OwnershipError(RuntimeError) a reference or pin was given back twice, or used after the end
    ├── BackendError(RuntimeError)   a backend failed; carries backend, operation and key
    │   └── BackendTimeoutError      ... because its deadline passed
    ├── CodecError(ValueError)       an encoded payload cannot be decoded
    ├── LookupServiceError(RuntimeError)  the lookup server answered with an error or not at all
    ├── RankError(RuntimeError)      another rank is gone, late or not of this engine
    ├── TraceError(ValueError)       a line of a recorded workload is malformed
    └── MissingExtraError(ImportError)    an optional dependency is not installed; names the extra
"""

from __future__ import annotations

from functools import partial


class KVKeepError(Exception):
    """Base of all of kvkeep's exceptions."""


class ConfigError(KVKeepError, ValueError):
    """A setting is unknown, malformed or contradicts another one."""


class IdentityError(KVKeepError, ValueError):
    """A CacheIdentity is incomplete or malformed."""


class TokenError(KVKeepError, ValueError):
    """Token ids are negative, over-wide or of a wrong shape or type."""


class MaskError(KVKeepError, ValueError):
    """A mask is not a run of False, then a run of True, on a chunk border."""


class LayoutError(KVKeepError, ValueError):
    """A KV layout is unknown, unsupported or does not survive its self-test."""


class OwnershipError(KVKeepError, RuntimeError):
    """A reference or pin was released twice, or memory was used after it was given back."""


class BackendError(KVKeepError, RuntimeError):
    """A storage backend failed.

    Args:
        message: what went wrong.
        backend: name of the backend.
        operation: the verb that failed (``put``, ``get``, ...).
        key: the chunk key concerned, if one is.
    """

    def __init__(
        self, message: str, *, backend: str, operation: str, key: bytes | None = None
    ) -> None:
        where = f"{backend}.{operation}"
        if key is not None:
            where += f"({key.hex()[:16]})"
        super().__init__(f"{where}: {message}")
        self.backend = backend
        self.operation = operation
        self.key = key
        self._message = message

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = partial(
            type(self),
            self._message,
            backend=self.backend,
            operation=self.operation,
            key=self.key,
        )
        return rebuild, ()


class BackendTimeoutError(BackendError):
    """A storage backend did not answer before its deadline."""


class CodecError(KVKeepError, ValueError):
    """An encoded payload is damaged, or was made by no codec that is known here."""


class LookupServiceError(KVKeepError, RuntimeError):
    """The lookup server answered with an error, or not at all."""


class RankError(KVKeepError, RuntimeError):
    """Another rank of the engine is gone, late, or does not speak the protocol of this one."""


class TraceError(KVKeepError, ValueError):
    """A line of a recorded workload is not what its format says; the message has its number."""


class MissingExtraError(KVKeepError, ImportError):
    """An optional dependency is not installed.

    Args:
        feature: what needs it.
        extra: the name of the extra that brings it.
    """

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional package: pip install 'kvkeep[{extra}]'")
        self.feature = feature
        self.extra = extra

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.feature, self.extra)
