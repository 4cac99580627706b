"""kvkeep for vLLM: an out-of-tree connector, loaded with ``--kv-transfer-config``.

``{"kv_connector": "KVKeepConnector", "kv_connector_module_path": "kvkeep.connectors.vllm",
"kv_role": "kv_both"}``
"""

from __future__ import annotations

from kvkeep.errors import MissingExtraError

try:
    import vllm as _vllm  # noqa: F401  tells a missing extra from a broken import
except ImportError as error:
    raise MissingExtraError("the vLLM connector", "vllm") from error

from kvkeep.connectors.vllm.connector import KVKeepConnector

__all__ = ["KVKeepConnector"]
