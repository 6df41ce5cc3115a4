from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.data.bins import min_bins
from agentrl.data.microbatch import token_budget_batches


def chapter_lengths() -> tuple[Tensor, Tensor]:
    """512 lengths, and the random order in which they are compared."""
    g = torch.Generator().manual_seed(0)
    lengths = (8192 * torch.exp(0.8 * torch.randn(512, generator=g))).clamp(256, 65536).long()
    return lengths, torch.randperm(512, generator=g)


def padded_costs(lengths: Tensor, batches: list[list[int]]) -> list[int]:
    return [len(b) * int(lengths[b].max()) for b in batches]


def padding(lengths: Tensor, batches: list[list[int]]) -> float:
    return 1 - int(lengths.sum()) / sum(padded_costs(lengths, batches))


def test_the_chapter_padded() -> None:
    lengths, _ = chapter_lengths()
    batches = token_budget_batches(lengths, 131_072)
    assert len(batches) == 51
    assert round(padding(lengths, batches), 3) == 0.030
    assert max(padded_costs(lengths, batches)) == 131_072
    longest = int(lengths.argmax())
    assert [len(b) for b in batches if longest in b] == [2]


def test_the_chapter_packed() -> None:
    lengths, _ = chapter_lengths()
    batches = token_budget_batches(lengths, 131_072, packed=True)
    assert len(batches) == min_bins(lengths, 131_072) == 46
    assert max(int(lengths[b].sum()) for b in batches) <= 131_072
    assert min_bins(lengths, 65_536) == 91
    assert len(token_budget_batches(lengths, 65_536, packed=True)) <= 92


def test_what_a_fixed_count_costs_instead() -> None:
    lengths, shuffled = chapter_lengths()
    for order, wasted in ((shuffled, 0.593), (lengths.argsort(descending=True), 0.036)):
        batches = order.view(64, 8).tolist()
        assert round(padding(lengths, batches), 3) == wasted
        assert max(padded_costs(lengths, batches)) == 524_288


@given(
    st.lists(st.integers(1, 20), max_size=30),
    st.integers(5, 60),
    st.booleans(),
    st.sampled_from(["solo", "drop", "truncate"]),
)
@settings(max_examples=80, deadline=None)
def test_no_batch_exceeds_the_budget(lengths: list[int], budget: int, packed: bool, overflow: Any) -> None:
    batches = token_budget_batches(lengths, budget, packed=packed, overflow=overflow)
    too_long = [i for i, n in enumerate(lengths) if n > budget]
    assert batches.overflowed == too_long
    assert sorted(i for b in batches for i in b) == [
        i for i in range(len(lengths)) if overflow != "drop" or i not in too_long
    ]
    for batch in batches:
        sizes = [min(lengths[i], budget) for i in batch]
        assert (sum(sizes) if packed else len(sizes) * max(sizes)) <= budget
        assert len(batch) == 1 or not set(batch) & set(too_long)
    firsts = [min(lengths[b[0]], budget) for b in batches]
    assert firsts == sorted(firsts, reverse=True)
    for batch in batches:
        assert batch == sorted(batch, key=lambda i: (-lengths[i], i))


def test_kinds_of_input_and_errors() -> None:
    assert token_budget_batches([], 8) == token_budget_batches([], 8, packed=True) == []
    assert (
        token_budget_batches(np.array([3, 5]), 8)
        == token_budget_batches(torch.tensor([3, 5]), 8)
        == [[1], [0]]
    )
    for packed in (False, True):
        with pytest.raises(ValueError, match="sequence 1 has 9 tokens but a batch may cost 8"):
            token_budget_batches([3, 9], 8, packed=packed)
        with pytest.raises(ValueError, match="length at index 1"):
            token_budget_batches([3, 0], 8, packed=packed)
        with pytest.raises(ValueError, match="max_tokens"):
            token_budget_batches([3], 0, packed=packed)
        with pytest.raises(ValueError, match="overflow"):
            token_budget_batches([3], 8, packed=packed, overflow="cut")  # type: ignore[arg-type]
