"""Fixtures for tests that need vLLM installed, though no engine: see ``toy_engine.py``."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

if HAS_VLLM:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    _spec = importlib.util.spec_from_file_location(
        "kvkeep_tests_toy_engine", Path(__file__).with_name("toy_engine.py")
    )
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_spec.name] = _module
    _spec.loader.exec_module(_module)
    tiny_model_dir = _module.tiny_model_dir
    engine_config = _module.engine_config
    toy_engine = _module.toy_engine
