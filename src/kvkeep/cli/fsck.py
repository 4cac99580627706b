"""``kvkeep fsck``: verifies every file of a disk tier, and removes what is damaged if asked."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvkeep.backends.disk.scan import FoundChunk
from kvkeep.backends.disk.survey import Damage, Survey
from kvkeep.cli.bar import Bar
from kvkeep.cli.failures import telling_failures
from kvkeep.cli.texts import about_size
from kvkeep.codec.frame import HEADER_BYTES

#: What a person reads for a cause.
MEANINGS = {
    "truncated": "the file is shorter than its header says",
    "length": "the file is longer than its header says",
    "not_a_file": "a directory, link or pipe has a chunk's name",
    "magic": "not a chunk at all",
    "version": "written by another version",
    "header_checksum": "a bit of the header changed",
    "fields": "a field of the header is out of bounds",
    "wrong_key": "a whole chunk under another one's name",
    "payload_checksum": "a bit of the payload changed",
    "codec": "a payload that its codec cannot have made",
    "stranger": "no name of a chunk",
    "ledger": "the ledger does not verify; a repair counts anew",
    "missing": "there is no ledger; a repair counts anew",
}


def fsck(
    directory: Annotated[
        Path, typer.Argument(help="The disk tier's directory (disk.path).", show_default=False)
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged, and count anew.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Read and verify every chunk of a disk tier, header and payload.

    Changes nothing without --repair. Engines may run meanwhile. Ends with exit code 0 if all is
    well, with 1 if damage was found, repaired or not, and with 2 if it could not run.
    """
    num_chunks = size_bytes = 0
    damages: list[Damage] = []
    with telling_failures("fsck"):
        survey = Survey(directory)
        with Bar(Console(stderr=True)) as bar:
            for number, item in enumerate(survey.verify()):
                bar.report(number, len(survey.entries), f"{num_chunks:,} chunks are whole")
                if isinstance(item, Damage):
                    damages.append(item)
                elif isinstance(item, FoundChunk):
                    num_chunks += 1
                    size_bytes += HEADER_BYTES + item.header.payload_bytes
        left = survey.repair(damages) if repair else [item.path for item in damages]
    left += [item.path for item in damages if repair and not (item.removable or _is_mended(item))]
    if as_json:
        values = {
            "directory": str(survey.root),
            "chunks": num_chunks,
            "bytes": size_bytes,
            "damages": [
                {"path": str(item.path), "cause": item.cause, "repaired": item.path not in left}
                for item in damages
            ],
        }
        typer.echo(json.dumps(values))
    else:
        console = Console(soft_wrap=True)
        console.print(f"{num_chunks:,} chunks are whole, {about_size(size_bytes)}.", style="green")
        _print_damages(damages, survey.root, console)
        if damages:
            console.print(_what_happened(damages, left, repair))
    if damages:
        raise typer.Exit(1)


def _is_mended(damage: Damage) -> bool:
    """There was no ledger, and a repair has made one."""
    return damage.cause == "missing"


def _print_damages(damages: list[Damage], root: Path, console: Console) -> None:
    by_cause: dict[str, list[Path]] = defaultdict(list)
    for damage in damages:
        by_cause[str(damage.cause)].append(damage.path.relative_to(root))
    for cause, paths in sorted(by_cause.items()):
        meaning = MEANINGS.get(cause, "cannot be read, so it may be whole")
        console.print(Text.assemble((cause, "bold red"), f": {meaning}"))
        for path in sorted(paths):
            console.print(Text(f"  {path}"))


def _what_happened(damages: list[Damage], left: list[Path], repair: bool) -> str:
    count = "1 file is" if len(damages) == 1 else f"{len(damages):,} files are"
    if not repair:
        return f"{count} no good. Nothing was changed; --repair removes what is damaged."
    if left:
        return f"{count} no good; {len(left):,} of them could not be removed and stay."
    return f"{count} no good, and removed or written anew."
