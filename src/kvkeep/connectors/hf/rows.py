"""The prompts in a batch: where each row's tokens begin, and what a call found for each.

Pure functions and values. In a batch of width W a row with n tokens looks like this, since models
that decode are padded on the left:

    column     0 ......... W-n-1 | W-n ................ W-1
    content    padding           | token 0 ...... token n-1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a batch.

    Attributes:
        index: row in the batch.
        padding: columns of padding before the first token.
        tokens: int64 [n] on the CPU, at least one.
    """

    index: int
    padding: int
    tokens: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, without padding."""
        return int(self.tokens.shape[0])


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a call did for one prompt.

    Attributes:
        num_tokens: tokens of the prompt, without padding.
        num_found: leading tokens whose KV was found.
        num_loaded: leading tokens whose KV was used instead of computed; at most ``num_tokens -
            1``, since the last token is always computed.
        num_stored: tokens of the prompt that are stored now, as one run from its start.
    """

    num_tokens: int
    num_found: int
    num_loaded: int
    num_stored: int


@dataclass(frozen=True, slots=True)
class CallReport:
    """What a call of generate did.

    Attributes:
        rows: one report per prompt, in the order of the batch.
        load_s: seconds spent in looking up and loading.
        prefill_s: seconds spent in computing what was not found, but for the last token.
        store_s: seconds spent in storing.
    """

    rows: Sequence[RowReport]
    load_s: float
    prefill_s: float
    store_s: float

    @property
    def num_found(self) -> int:
        """Tokens found over all rows."""
        return sum(row.num_found for row in self.rows)


def split_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[PromptRow]:
    """Take the padding off each row.

    Args:
        input_ids: integers [rows, width].
        attention_mask: integers of the same shape, 0 at padding.

    Raises:
        ValueError: the shapes differ, a row is empty, padded on the right or has holes.
    """
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, but input_ids has "
            f"{tuple(input_ids.shape)}"
        )
    ids = input_ids.detach().to("cpu", torch.long)
    present = attention_mask.detach().to("cpu") != 0
    width = ids.shape[1]
    rows: list[PromptRow] = []
    for index in range(ids.shape[0]):
        count = int(present[index].sum())
        if count == 0:
            raise ValueError(f"row {index} of the batch is nothing but padding")
        if not bool(present[index, width - count :].all()):
            raise ValueError(
                f"row {index} of the batch is padded on the right or has holes in its attention "
                "mask; pad on the left (padding_side='left')"
            )
        rows.append(PromptRow(index, width - count, ids[index, width - count :]))
    return rows
