"""Taking the padding off a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.connectors.hf.caches import CallReport, RowReport, split_rows


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_rows_come_back_without_their_padding(lengths: list[int], extra: int) -> None:
    width = max(lengths) + extra
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width)
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    rows = split_rows(ids, mask)
    assert [row.index for row in rows] == list(range(len(lengths)))
    for row, length in zip(rows, lengths, strict=True):
        assert row.num_tokens == length
        assert row.padding == width - length
        assert torch.equal(row.tokens, ids[row.index, row.padding :])


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_anything_but_left_padding_is_refused(present: list[bool]) -> None:
    mask = torch.tensor([present]).long()
    ids = torch.ones_like(mask)
    left_padded = any(present) and present == sorted(present)
    if left_padded:
        assert split_rows(ids, mask)[0].num_tokens == sum(present)
    else:
        with pytest.raises(ValueError, match="row 0"):
            split_rows(ids, mask)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        split_rows(torch.ones(2, 4, dtype=torch.long), torch.ones(2, 3))


def test_report_sums_over_rows() -> None:
    rows = [RowReport(10, 8, 8, 8), RowReport(4, 0, 0, 0), RowReport(16, 16, 15, 16)]
    assert CallReport(rows, load_s=0.0, prefill_s=0.0, store_s=0.0).num_found == 24
