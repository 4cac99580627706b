"""Arithmetic on prefixes, masks and runs: pure functions that return plans.

Callable from any thread; no torch (masks arrive as anything numpy can read). Intervals, on a prompt
of five chunks whose first chunk the engine has already and whose second and third are stored:

    tokens  |  0 ..  |  1 ..  |  2 ..  |  3 ..  |  4 ..  | tail |
    mask    | False  | True   | True   | True   | True   | True |
    stored  |   ?    |  yes   |  yes   |   no   |   ?    |      |
    result  | False  | True   | True   | False  | False  | False|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeep.errors import MaskError


def count_masked(mask: object, num_tokens: int, chunk_size: int) -> int:
    """Number of leading tokens that a mask excludes (spec 1.6).

    Args:
        mask: bools, one per token (torch tensor on the CPU, numpy array or sequence), or None for
            all True.
        num_tokens: length of the prompt.
        chunk_size: tokens in a chunk.

    Raises:
        MaskError: the mask is no run of False followed by a run of True, has another length than
            the tokens, or its False run ends inside a chunk.
    """
    if mask is None:
        return 0
    values = np.asarray(mask)
    if values.size == 0 and num_tokens == 0:
        return 0
    if values.dtype != np.bool_ or values.ndim != 1:
        raise MaskError(
            f"the mask must be one-dimensional bool, got {values.dtype} of shape {values.shape}"
        )
    if len(values) != num_tokens:
        raise MaskError(f"the mask has {len(values)} entries for {num_tokens} tokens")
    num_true = int(np.count_nonzero(values))
    num_false = num_tokens - num_true
    if num_true and not bool(values[num_false:].all()):
        first = int(np.argmax(values))
        raise MaskError(
            f"the mask must be False first and then True; it is True at {first}, then False again"
        )
    if num_false % chunk_size:
        raise MaskError(
            f"the mask excludes {num_false} tokens, no multiple of the chunk size {chunk_size}"
        )
    return num_false


@dataclass(frozen=True, slots=True)
class LocatedRun:
    """A run of consecutive chunks that one backend holds.

    Attributes:
        location: name of the backend.
        start: index of the run's first chunk.
        end: index after its last.
    """

    location: str
    start: int
    end: int


def locate_prefix(
    num_chunks: int, askers: Sequence[tuple[str, Callable[[int], int]]]
) -> list[LocatedRun]:
    """Which backend holds which chunk of a prefix (spec 4.6).

    The first backend is asked for its run of hits from chunk 0, the next for the run from there,
    and so on; when a later backend's run ends, the earlier ones are asked again.

    Args:
        num_chunks: chunks in the prefix.
        askers: (name, ask) per backend in order of priority; ``ask(start)`` returns how many chunks
            from index ``start`` on the backend holds without a gap.

    Returns:
        Runs in order, without gaps, the first one starting at chunk 0. Chunks after the last run
        are held by nobody.
    """
    runs: list[LocatedRun] = []
    position = 0
    while position < num_chunks:
        for name, ask in askers:
            if runs and runs[-1].location == name:
                continue  # its run has just ended here
            length = min(ask(position), num_chunks - position)
            if length > 0:
                runs.append(LocatedRun(name, position, position + length))
                position += length
                break
        else:
            break
    return runs


def page_runs(pages: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Group pages into runs of neighbours, so that a run is one copy.

    Args:
        pages: page numbers of an engine, in token order.

    Returns:
        (index in ``pages``, first page, number of pages) per run.
    """
    if len(pages) == 0:
        return []
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(pages)]
    return [(s, int(pages[s]), e - s) for s, e in zip(starts, ends, strict=True)]
