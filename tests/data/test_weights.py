"""The mode table and the weight of every action token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.weights import MODES, padded_weights, resolve_mode, trajectory_weights

COUNTS = torch.tensor([2, 10, 0])
NEEDS_NORM = {"constant", "sequence_sum_norm"}


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token_mean", [1 / 12, 1 / 12]),
        ("token_sum", [1, 1]),
        ("sequence_mean", [1 / 4, 1 / 20]),
        ("sequence_sum", [1 / 2, 1 / 2]),
        ("sequence_sum_norm", [1 / 20, 1 / 20]),
        ("constant", [1 / 10, 1 / 10]),
        ("prompt_mean", [1 / 4, 1 / 20]),
    ],
)
def test_weights_of_each_mode(mode: str, want: list[float]) -> None:
    norm_const = 10 if mode in NEEDS_NORM else None
    got = trajectory_weights(COUNTS, mode, norm_const, groups=torch.arange(3))
    torch.testing.assert_close(got[:2], torch.tensor(want, dtype=torch.float64))
    assert bool(got.isfinite().all())


def test_every_alias_resolves_and_names_are_unique() -> None:
    names = [name for mode, aliases in MODES.items() for name in (mode, *aliases)]
    assert len(names) == len(set(names))
    assert {resolve_mode(name) for name in names} == set(MODES)
    assert resolve_mode("grpo") == "sequence_mean"
    assert resolve_mode("dapo") == "token_mean"


def test_an_episode_is_one_sequence() -> None:
    got = trajectory_weights(torch.tensor([3, 1, 4]), "sequence_mean", episodes=torch.tensor([0, 0, 1]))
    torch.testing.assert_close(got, torch.full((3,), 1 / 8, dtype=torch.float64))
    got = trajectory_weights(torch.tensor([3, 1, 4]), "sequence_sum", episodes=torch.tensor([5, 5, 1]))
    torch.testing.assert_close(got, torch.full((3,), 1 / 2, dtype=torch.float64))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from(["token_mean", "sequence_mean"]))
def test_means_add_up_to_one(counts: list[int], mode: str) -> None:
    total = (trajectory_weights(torch.tensor(counts), mode) * torch.tensor(counts)).sum()
    torch.testing.assert_close(total, torch.tensor(float(sum(counts) > 0), dtype=torch.float64))


def test_padded_weights_are_zero_off_the_mask() -> None:
    mask = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    got = padded_weights(mask, "prompt_mean", groups=torch.tensor([0, 1, 0]))
    torch.testing.assert_close(got, mask.double() / 6)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown loss mode 'mean'"):
        resolve_mode("mean")
    for bad in (None, 0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="give a positive one"):
            trajectory_weights(COUNTS, "dr_grpo", bad)
    with pytest.raises(ValueError, match="pass groups="):
        trajectory_weights(COUNTS, "prompt_mean")
    with pytest.raises(ValueError, match="labels must have shape"):
        trajectory_weights(COUNTS, "sequence_sum", episodes=torch.zeros(2))
