"""The mode table and the weight of every action token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import (
    Denominators,
    RLConfig,
    Trajectory,
    aggregate_loss,
    collate,
    compute_advantages,
    microbatch_weight_distortion,
    reinforce_loss,
    token_weights,
)
from agentrl.data.weights import MODES, padded_weights, resolve_mode, step_in_parts, trajectory_weights
from agentrl.rollout.episode import has_signal

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


def trajectory(num_actions: int, *, reward: float = 0.0, group: str = "", episode: str = "") -> Trajectory:
    """A prompt of two tokens, the action tokens, and an observation."""
    mask = torch.tensor([0.0] + [1.0] * num_actions + [0.0])
    ids = torch.arange(num_actions + 3)
    return Trajectory(ids, mask, torch.zeros_like(mask), reward, group=group, episode=episode)


def weighted_sum(weights: list[torch.Tensor], losses: list[float]) -> float:
    return sum(float(w.sum()) * loss for w, loss in zip(weights, losses, strict=True))


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token_mean", 20 / 12),
        ("dapo", 20 / 12),
        ("token_sum", 20.0),
        ("sequence_mean", 3.0),
        ("grpo", 3.0),
        ("sequence_sum", 10.0),
        ("constant", 2.0),
        ("sequence_sum_norm", 1.0),
        ("dr_grpo", 1.0),
        ("prompt_mean", 3.0),
    ],
)
def test_pinned_token_weights(mode: str, want: float) -> None:
    trajs = [trajectory(2, group="a"), trajectory(10, group="b")]
    for extra in ([], [trajectory(0, group="c")]):  # a fully masked trajectory counts nothing
        got = token_weights(trajs + extra, mode, norm_const=10)
        assert weighted_sum(got, [5.0, 1.0] + [7.0] * len(extra)) == pytest.approx(want, rel=1e-12)
        for weights, t in zip(got, trajs + extra, strict=True):
            assert weights.dtype == torch.float64
            assert torch.equal(weights > 0, t.action_mask == 1)


def test_trajectories_of_an_episode_count_as_one_sequence() -> None:
    split = [trajectory(2, episode="e"), trajectory(3, episode="e"), trajectory(7)]
    whole = [trajectory(5), trajectory(7)]
    for mode in ("sequence_mean", "sequence_sum", "sequence_sum_norm"):
        got = token_weights(split, mode, norm_const=3)
        want = token_weights(whole, mode, norm_const=3)
        assert torch.equal(torch.cat([w[w > 0] for w in got]), torch.cat([w[w > 0] for w in want]))


def test_groups_without_signal_can_be_left_out() -> None:
    trajs = [
        trajectory(2, reward=1, group="a"),
        trajectory(4, reward=0, group="a"),
        trajectory(3, reward=1, group="b"),
        trajectory(9, reward=1, group="b"),
    ]
    for mode in MODES:
        got = token_weights(trajs, mode, norm_const=2, zero_advantage="exclude")
        want = token_weights(trajs[:2], mode, norm_const=2)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=False))
        assert not got[2].any()
        assert not got[3].any()
    with pytest.raises(ValueError, match="trajectory 0 names no group"):
        token_weights([trajectory(1)], zero_advantage="exclude")
    with pytest.raises(ValueError, match="zero_advantage must be one of 'include', 'exclude'"):
        token_weights(trajs, zero_advantage="drop")  # type: ignore[arg-type]


def test_rewards_that_differ_by_rounding_alone_are_no_signal() -> None:
    trajs = [trajectory(2, reward=0.1 + 0.2, group="a"), trajectory(4, reward=0.3, group="a")]
    assert not compute_advantages(collate(trajs, pad_id=0), RLConfig()).any()
    assert not has_signal(trajs)  # or the step would count tokens that cannot teach it anything
    assert Denominators.of(trajs, "exclude") == Denominators()
    assert not torch.cat(token_weights(trajs, zero_advantage="exclude")).any()


parts_of_a_step = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 2)),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(parts_of_a_step, st.sampled_from(sorted(MODES)))
def test_weights_of_parts_are_those_of_the_whole(
    described: list[tuple[int, str, str, int]], mode: str
) -> None:
    # an episode belongs to one group, and a group to one rank
    trajs = [trajectory(n, group=g, episode=g + e) for n, g, e, _ in described]
    rank_of = {g: rank for _, g, _, rank in described}
    whole = token_weights(trajs, mode, norm_const=4)
    members = [[i for i, t in enumerate(trajs) if rank_of[t.group] == rank] for rank in range(3)]
    denominators = sum((Denominators.of([trajs[i] for i in part]) for part in members), start=Denominators())
    for part in members:
        got = token_weights([trajs[i] for i in part], mode, norm_const=4, denominators=denominators)
        assert all(torch.equal(w, whole[i]) for w, i in zip(got, part, strict=True))


@settings(max_examples=40, deadline=None)
@given(parts_of_a_step, st.sampled_from(sorted(MODES)), st.integers(0, 99))
def test_padded_reduction_gives_the_same_number(
    described: list[tuple[int, str, str, int]], mode: str, seed: int
) -> None:
    trajs = [trajectory(n, group=g, episode=g + e) for n, g, e, _ in described]
    batch = collate(trajs, pad_id=0)
    generator = torch.Generator().manual_seed(seed)
    per_token = torch.randn(batch["action_mask"].shape, generator=generator, dtype=torch.float64)
    weights = token_weights(trajs, mode, norm_const=4)
    want = sum(float((w * row[: len(w)]).sum()) for w, row in zip(weights, per_token, strict=True))
    labels = {"episodes": batch["episode"], "groups": batch["group"]}
    got = aggregate_loss(per_token, batch["action_mask"], mode, 4, **labels)
    assert got.item() == pytest.approx(want, rel=1e-12, abs=1e-12)
    minus = reinforce_loss(
        -per_token, torch.ones(len(trajs), dtype=torch.float64), batch["action_mask"], mode, 4, **labels
    )
    assert minus.item() == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_a_mean_over_a_part_raises_where_a_step_is_in_parts() -> None:
    trajs = [trajectory(2), trajectory(1)]
    per_token, mask = torch.ones(2, 3), torch.ones(2, 3)
    with step_in_parts():
        for mode in ("token_mean", "grpo", "sequence_sum", "dr_grpo"):
            with pytest.raises(ValueError, match="mean over a part of an optimizer step"):
                aggregate_loss(per_token, mask, mode, 5)
            with pytest.raises(ValueError, match="mean over a part of an optimizer step"):
                token_weights(trajs, mode, norm_const=5)
        assert aggregate_loss(per_token, mask, "token_sum").item() == 6
        assert aggregate_loss(per_token, mask, "constant", 3).item() == 2
    assert aggregate_loss(per_token, mask, "token_mean").item() == 1


def test_distortion_of_local_means() -> None:
    got = microbatch_weight_distortion([96, 112, 180, 355])
    assert [round(factor, 2) for factor in got] == [1.93, 1.66, 1.03, 0.52]
    assert microbatch_weight_distortion(torch.tensor([7, 7, 7])) == [1.0, 1.0, 1.0]
    assert microbatch_weight_distortion([]) == []
    # the factor is what happens to a token's weight in the mean of the microbatches' means
    counts = torch.tensor([3, 1, 8])
    local = torch.cat([trajectory_weights(n[None]) for n in counts]) / 3
    torch.testing.assert_close(
        local / trajectory_weights(counts),
        torch.tensor(microbatch_weight_distortion(counts), dtype=torch.float64),
    )
    with pytest.raises(ValueError, match="index 1"):
        microbatch_weight_distortion([5, 0])
