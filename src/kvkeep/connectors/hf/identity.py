"""What a model's KV depends on besides the tokens: a fingerprint of weights, buffers and config.

The whole content of every tensor is hashed, so that no change of a weight goes unseen; about a
second per gigabyte and core, once per attached model. :func:`weights_state` is the cheap look that
tells whether that has to be done again. Called from the thread that calls the model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvkeep.errors import IdentityError, LayoutError
from kvkeep.identity import TAG_PREFIX
from kvkeep.tokens import PLAIN, RequestScope, make_scope

#: Config entries on which KV does not depend.
IGNORED_CONFIG = frozenset(
    {"_name_or_path", "transformers_version", "use_cache", "id2label", "label2id"}
)
#: Weights of which each call looks at some values, and values of each.
SAMPLED_TENSORS, SAMPLED_VALUES = 512, 16
#: Threads that hash; hashing releases the interpreter's lock.
MAX_THREADS = 4


def weights_fingerprint(model: Any) -> str:
    """Hex SHA-256 over names, shapes, dtypes and contents of all parameters and buffers.

    Args:
        model: a torch module.

    Raises:
        IdentityError: a tensor's content cannot be read (offloaded weights, say).
    """
    tensors = sorted(_tensors(model), key=lambda item: item[0])
    threads = max(1, min(MAX_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="kvkeep-fingerprint") as pool:
        digests = list(pool.map(lambda item: _tensor_digest(*item), tensors))
    return hashlib.sha256(b"kvkeep weights\0" + b"".join(digests)).hexdigest()


def config_digest(model: Any) -> str:
    """Hex SHA-256 over the model's config (RoPE parameters included) and attention implementation.

    Other attention code gives the same KV but for rounding. It is part of the identity all the
    same, so that what is loaded is what this very code would have computed.
    """
    config = model.config
    values = {name: value for name, value in config.to_dict().items() if name not in IGNORED_CONFIG}
    text = json.dumps(
        [values, getattr(config, "_attn_implementation", None)], sort_keys=True, default=str
    )
    return hashlib.sha256(b"kvkeep config\0" + text.encode()).hexdigest()


def weights_state(model: Any) -> int:
    """A number that changes when a weight is replaced or written to; reads a few values only.

    Writes that torch does not count (through ``.data``, a numpy view, or to weights that were made
    in inference mode) show by the values that are read, so they do not where they leave all but a
    few weights as they are.
    """
    tensors = [(name, tensor) for name, tensor in _tensors(model) if not tensor.is_meta]
    versions = tuple(
        (name, tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)
        for name, tensor in tensors
    )
    step = -(-len(tensors) // SAMPLED_TENSORS) or 1
    return hash((versions, _sampled([tensor for _, tensor in tensors[::step]])))


def _sampled(tensors: list[torch.Tensor]) -> bytes:
    """The bytes of some values of each tensor; one that is no plain block of memory has none."""
    parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
        if is_plain and tensor.numel():
            values = tensor.detach().view(-1)[:: -(-tensor.numel() // SAMPLED_VALUES)]
            parts.setdefault((tensor.device, tensor.dtype), []).append(values)
    joined = (torch.cat(values).view(torch.uint8).cpu() for values in parts.values())
    return b"".join(block.numpy().tobytes() for block in joined)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """32 bytes that stand for one tensor."""
    if tensor.is_meta:
        raise IdentityError(
            f"the weights {name!r} are not in memory, so they have no fingerprint; pass revision="
        )
    flat = tensor.detach().contiguous().reshape(-1)
    try:
        content = flat.view(torch.uint8).cpu().numpy().data
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise IdentityError(
            f"cannot read the weights {name!r} ({type(tensor).__name__}, {tensor.dtype}); "
            f"pass revision=: {error}"
        ) from error
    head = f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode()
    digest = hashlib.sha256(head)
    digest.update(content)
    return digest.digest()


class ModelWeights:
    """Which weights and config a model has; notices when they change after it was attached.

    Attributes:
        revision: what they were when the model was attached, for the identity.
    """

    def __init__(self, model: Any, revision: str | None) -> None:
        """Fingerprint the weights, unless the caller names their revision.

        Raises:
            IdentityError: the weights cannot be read and no revision was given.
        """
        self._model = model
        self._state = (weights_state(model), config_digest(model))
        self._scope = PLAIN
        self.revision = _revision(revision or weights_fingerprint(model), self._state[1])

    def scope(self) -> RequestScope:
        """What requests add to the identity: nothing, or a tag for weights or config that changed.

        Raises:
            LayoutError: the model carries adapters or hooks by now.
        """
        refuse_hooks(self._model)
        state = (weights_state(self._model), config_digest(self._model))
        if state != self._state:
            refuse_adapters(self._model)
            now = _revision(weights_fingerprint(self._model), state[1])
            tags = {f"{TAG_PREFIX}kvkeep.weights": now}
            self._scope = PLAIN if now == self.revision else make_scope(request_configs=tags)
            self._state = state
        return self._scope


def _revision(weights: str, config: str) -> str:
    return f"weights:{weights} config:{config}"


def refuse_adapters(model: Any) -> None:
    """Adapters can be switched without a trace in the weights, so they are refused.

    Raises:
        LayoutError: the model carries some.
    """
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise LayoutError(
            f"{type(model).__name__} carries adapters, which can be switched unseen; merge them "
            "into the weights (merge_and_unload) and attach the result"
        )


def refuse_hooks(model: Any) -> None:
    """Forward hooks may change what a layer computes, without a trace in weights or config.

    Those of transformers itself only look on.

    Raises:
        LayoutError: the model has others.
    """
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                raise LayoutError(
                    f"{name or type(model).__name__} has a forward hook ({hook!r}), which may "
                    "change KV and would not see the tokens that are loaded; remove it, or call "
                    "generate of the model itself"
                )
