"""``kvkeep bench``: this machine's tiers against its own limits, in less than a minute."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvkeep.cli.config import read_extra
from kvkeep.cli.output import Bar, about_size, telling_failures
from kvkeep.config.base import parse_size
from kvkeep.config.load import resolve_settings
from kvkeep.config.settings import Settings
from kvkeep.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.bench.measure import Row

WIDTH = 80
#: What a chunk of 256 tokens of an 8B model takes.
_CHUNK_BYTES = 32 << 20
#: Smallest amount that is more than a processor's cache, and a few chunks.
_SMALLEST_BYTES = 64 << 20
_REPEATS, _DISK_ROUNDS = 5, 3
_PAGE_TOKENS = 16

#: (what it does, the rows).
_Job = tuple[str, Callable[[], "list[Row]"]]


def bench(
    config: Annotated[
        Path | None, typer.Option(help="A YAML file. Default: the one that KVKEEP_CONFIG names.")
    ] = None,
    extra: Annotated[
        str | None, typer.Option(help="The engine's extra config, as a JSON object.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to write files. Default: disk.path, or a temporary one."),
    ] = None,
    size: Annotated[
        str, typer.Option(help="How much each row moves; four times that in memory.")
    ] = "256MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Measure keys, lookups, copies, disk and remote store beside what this machine can do.

    Each row holds kvkeep against the plain thing in the same run: a hash, a memcpy, files written
    by as many threads, the store's own client. Changes nothing that lasts. Ends with exit code 0
    whatever the ratios are, and 2 if it could not run.
    """
    with telling_failures("bench"), ExitStack() as opened:
        loaded = resolve_settings(
            yaml_path=config, env=os.environ, extra=read_extra(extra), extra_origin="--extra"
        )
        settings, num_bytes = loaded.settings, _parse(size)
        folder = _folder(directory or settings.disk.path, opened)
        jobs = _jobs(settings, folder, num_bytes)
        rows: list[Row] = []
        with Bar(Console(stderr=True)) as bar:
            for done, (doing, run) in enumerate(jobs):
                bar.report(done, len(jobs), doing)
                rows += run()
    _show(rows, folder, as_json)


def _jobs(settings: Settings, folder: Path, num_bytes: int) -> list[_Job]:
    """What is measured, in order."""
    from kvkeep.bench import engine, tiers
    from kvkeep.bench.measure import use_one_thread

    use_one_thread()
    num_tokens = num_bytes // (engine.NUM_LAYERS * engine.TOKEN_LAYER_BYTES) // 256 * 256
    chunk_bytes = min(_CHUNK_BYTES, num_bytes // 8)
    count = num_bytes // chunk_bytes
    jobs: list[_Job] = [
        ("keys and lookups", lambda: engine.run_keys(_REPEATS)),
        (
            "copies in and out of paged KV",
            lambda: engine.run_copies(_REPEATS, [(num_tokens, _PAGE_TOKENS)]),
        ),
        (
            f"files in {folder}",
            lambda: tiers.run_disk(
                folder,
                chunk_bytes=chunk_bytes,
                count=count,
                threads=settings.disk.threads,
                rounds=_DISK_ROUNDS,
            ),
        ),
    ]
    if settings.remote.url is not None:
        tiers.require_store(settings.remote)
        jobs.append(
            (
                "the remote store",
                lambda: tiers.run_remote(settings.remote, chunk_bytes=chunk_bytes, count=count),
            )
        )
    return jobs


def _folder(path: Path | None, opened: ExitStack) -> Path:
    """Where files are written: ``path``, or a temporary folder that ``opened`` removes."""
    if path is None:
        return Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvkeep-bench-")))
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; make it, or name another one with --dir")
    return path


def _parse(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--size {text!r}: {error}") from error
    if not isinstance(size_bytes, int) or size_bytes < _SMALLEST_BYTES:
        raise ConfigError(f"--size {text!r}: must be at least {about_size(_SMALLEST_BYTES)}")
    return size_bytes


def _show(rows: list[Row], folder: Path, as_json: bool) -> None:
    from kvkeep.bench.measure import machine, row_values, show

    facts = machine()
    if as_json:
        typer.echo(json.dumps({"machine": facts, "rows": [row_values(row) for row in rows]}))
        return
    console = Console()
    console.print()
    title = Text(f"kvkeep against this machine: {facts['cpu']}, {facts['cores']} cores")
    title.stylize("bold")
    console.print(title, width=WIDTH)
    console.print()
    show(rows, console)
    console.print()
    text = Text(
        "The limit is the plain thing in the same run: a chained SHA-256, a memcpy with one "
        f"thread, files in {folder} without header, checksum or rename"
    )
    is_remote = any(row.what.startswith("remote") for row in rows)
    text.append(", the store's own client." if is_remote else ".")
    text.append(" A ratio below its target on a busy machine says little: try again.")
    text.stylize("dim")
    console.print(text, width=WIDTH)
