"""Packed scoring against every trajectory alone: log-probs, gradients, isolation, the two classic bugs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.data.packing import pack_sequences
from agentrl.models.reference import alone_log_probs, mask_errors
from agentrl.models.scoring import packed_log_probs, packed_logits, sequence_log_probs, visible_until_of
from agentrl.models.tiny import TinyAgent, TinyConfig

VOCAB = 23


def tiny(dtype: torch.dtype = torch.float64) -> TinyAgent:
    """A small TinyAgent whose random weights are large enough for context to matter."""
    torch.manual_seed(0)
    model = TinyAgent(TinyConfig(vocab_size=VOCAB, width=16, num_layers=2, num_heads=2, max_positions=256))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, expected in want.items():
        error = float((got[name] - expected).norm() / expected.norm().clamp_min(1e-12))
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 100_000), share=st.booleans(), capacity=st.sampled_from([24, 40, 100]))
def test_packed_rows_equal_every_trajectory_alone(
    seed: int, share: bool, capacity: int, related_trajectories, gradients
) -> None:
    model = tiny()
    trajs = related_trajectories(seed)
    packed = pack_sequences(trajs, capacity, share_prefixes=share)
    got, want = packed_log_probs(model, packed), alone_log_probs(model, packed)
    assert got.shape == want.shape == packed.actions.target.shape
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    weights = torch.from_numpy(np.random.default_rng(seed).standard_normal(len(got)))
    if len(got):
        assert_same_gradients(
            gradients(model, packed_log_probs(model, packed), weights), gradients(model, want, weights), 1e-10
        )


def test_the_reference_is_the_padded_path(related_trajectories) -> None:
    model = tiny()
    trajs = related_trajectories(5)
    packed = pack_sequences(trajs, 60)
    want = alone_log_probs(model, packed, temperature=0.7)
    for index, traj in enumerate(trajs):
        mine = packed.actions.trajectory == index
        padded = torch.cat([traj.ids, torch.zeros(5, dtype=torch.int64)])[None]
        scored = sequence_log_probs(model, padded, temperature=0.7)[0]
        torch.testing.assert_close(scored[packed.actions.offset[mine]], want[mine], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(packed_log_probs(model, packed, 0.7), want, rtol=1e-10, atol=1e-12)


def test_packed_logits_are_each_segments_own(related_trajectories) -> None:
    model = tiny()
    packed = pack_sequences(related_trajectories(3), 50)
    logits = packed_logits(model, packed.ids, packed.position_ids, packed.segment_ids)
    assert logits.shape == (*packed.ids.shape, VOCAB)
    for row in range(packed.ids.shape[0]):
        for segment in range(int(packed.segment_ids[row].max()) + 1):
            mine = packed.segment_ids[row] == segment
            alone = model(packed.ids[row, mine][None])[0]
            torch.testing.assert_close(logits[row, mine], alone, rtol=1e-10, atol=1e-12)
    assert torch.equal(visible_until_of(packed.position_ids, packed.segment_ids), packed.visible_until)


def test_packed_logits_of_a_tree_need_its_visibility(related_trajectories) -> None:
    model = tiny()
    packed = pack_sequences(related_trajectories(2), 60, share_prefixes=True)
    with pytest.raises(ValueError, match="visible_until=packed"):
        packed_logits(model, packed.ids, packed.position_ids, packed.segment_ids)
    logits = packed_logits(
        model, packed.ids, packed.position_ids, packed.segment_ids, visible_until=packed.visible_until
    )
    rows = logits.flatten(0, 1)[packed.actions.source]
    got = torch.log_softmax(rows, -1).gather(-1, packed.actions.target[:, None])[:, 0]
    torch.testing.assert_close(got, alone_log_probs(model, packed), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_perturbing_one_sequence_leaves_the_others_bits(dtype: torch.dtype, related_trajectories) -> None:
    model = tiny(dtype)
    packed = pack_sequences(related_trajectories(11, num_trajs=12), 48)
    before = packed_logits(model, packed.ids, packed.position_ids, packed.segment_ids)
    for segment in range(2):
        mine = packed.segment_ids[0] == segment
        ids = packed.ids.clone()
        ids[0, mine] = (ids[0, mine] + 1) % VOCAB
        after = packed_logits(model, ids, packed.position_ids, packed.segment_ids)
        assert torch.equal(before[0, ~mine], after[0, ~mine])
        assert torch.equal(before[1:], after[1:])
        assert not torch.equal(before[0, mine], after[0, mine])


def test_the_two_classic_masks_are_caught(related_trajectories) -> None:
    model = tiny()
    packed = pack_sequences(related_trajectories(7, num_trajs=16), 128)
    errors = mask_errors(model, packed)
    assert errors.visible < 1e-10
    assert errors.causal_running_positions > 0.5
    assert errors.causal_restarted_positions > 0.05


def test_wrong_rows_are_refused() -> None:
    model = tiny()
    ids = torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match="two pieces"):
        packed_logits(model, ids, torch.tensor([[0, 1, 0, 0]]), torch.tensor([[0, 0, 1, 0]]))
    with pytest.raises(ValueError, match="row 0, position 2 starts at position id 1; positions restart"):
        visible_until_of(torch.tensor([[0, 1, 1, 2]]), torch.tensor([[0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="segment_ids must be"):
        packed_logits(model, ids, torch.tensor([[0, 1, 0, 0]]), torch.tensor([[0, 0, 1]]))
    with pytest.raises(ValueError, match="transformers causal LM"):
        packed_logits(torch.nn.Linear(2, 2), ids, ids, ids)


def test_no_trajectories_at_all_give_empty_rows() -> None:
    packed = pack_sequences([], 8, pad_to=None)
    model = TinyAgent(TinyConfig(vocab_size=11))
    logits = packed_logits(model, packed.ids, packed.position_ids, packed.segment_ids)
    assert logits.shape == (*packed.ids.shape, 11)
    assert packed_log_probs(model, packed).shape == (0,)
