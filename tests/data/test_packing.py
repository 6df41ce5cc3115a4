from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.data.packing import PackedBatch, pack_lengths, pack_sequences, unpack
from agentrl.data.trajectory import Trajectory


def trajectory(ids: list[int], generator: torch.Generator, known: bool = True) -> Trajectory:
    num = len(ids) - 1
    mask = (torch.rand(num, generator=generator) < 0.4).float()
    logp = -torch.rand(num, generator=generator) * mask if known else torch.full((num,), torch.nan)
    return Trajectory(torch.tensor(ids), mask, logp, reward=0.0)


def random_trajectories(seed: int, num: int, longest: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num,), generator=generator).tolist()
    return [trajectory(torch.randint(0, 50, (n,), generator=generator).tolist(), generator) for n in lengths]


def readable(visible_until: Tensor) -> Tensor:
    """[L, L] of one row: may position i (first axis) read position j?"""
    row = torch.arange(visible_until.numel())
    return (row[None, :] <= row[:, None]) & (row[:, None] < visible_until[None, :])


def assert_exact(packed: PackedBatch, trajs: list[Trajectory], max_tokens: int) -> None:
    """Every token reads its own trajectory's tokens up to itself and nothing else; nothing is lost."""
    width = packed.ids.shape[1]
    assert sorted(i for members in packed.rows for i in members) == list(range(len(trajs)))
    assert ((packed.segment_ids >= 0).sum(1) <= max_tokens).all()
    places = packed.token_index.split(packed.lengths.tolist())
    masks = [readable(row) for row in packed.visible_until]
    covered = torch.zeros(packed.ids.numel(), dtype=torch.bool)
    for index, (t, place) in enumerate(zip(trajs, places, strict=True)):
        row = int(place[0]) // width
        assert index in packed.rows[row]
        assert torch.equal(packed.ids.flatten()[place], t.ids)
        assert torch.equal(packed.position_ids.flatten()[place], torch.arange(t.num_tokens))
        column = place - row * width
        assert ((column >= 0) & (column < width)).all()
        for step in range(t.num_tokens):
            reads = masks[row][column[step]].nonzero().flatten()
            assert torch.equal(reads, column[: step + 1])
        covered[place] = True
        mine = packed.actions.trajectory == index
        offset = packed.actions.offset[mine]
        assert torch.equal(offset, t.action_mask.nonzero().flatten())
        assert torch.equal(packed.actions.source[mine], place[offset])
        assert torch.equal(packed.actions.target[mine], t.ids[offset + 1])
        assert torch.equal(packed.actions.sample_logp[mine], t.sample_logp[offset])
    padding = packed.segment_ids.flatten() < 0
    assert torch.equal(covered, ~padding)
    for row, mask in enumerate(masks):
        alone = padding.view(packed.ids.shape)[row]
        assert torch.equal(mask[alone], torch.eye(width, dtype=torch.bool)[alone])


@given(st.integers(0, 10_000), st.integers(0, 9), st.sampled_from(["row", None, 1, 8]))
@settings(max_examples=60, deadline=None)
def test_flat_rows(seed: int, num: int, pad_to: int | None) -> None:
    trajs = random_trajectories(seed, num, 12)
    packed = pack_sequences(trajs, 16, pad_to=pad_to)  # type: ignore[arg-type]
    assert_exact(packed, trajs, 16)
    assert packed.rows == pack_lengths([t.num_tokens for t in trajs], 16, algorithm="first_fit_decreasing")
    assert packed.num_tokens == sum(t.num_tokens for t in trajs)


def test_the_layout_of_the_textbook() -> None:
    trajs = [
        Trajectory(torch.tensor([3, 4, 5]), torch.tensor([0.0, 1.0]), torch.tensor([0.0, -0.5]), 0.0),
        Trajectory(
            torch.tensor([6, 7, 8, 9]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([-1.0, 0.0, -2.0]), 0.0
        ),
        Trajectory(torch.tensor([2, 1]), torch.tensor([1.0]), torch.tensor([-3.0]), 0.0),
    ]
    packed = pack_sequences(trajs, 8, pad_id=99)
    assert packed["rows"] == [[1, 0], [2]]
    assert packed["ids"].tolist() == [[6, 7, 8, 9, 3, 4, 5, 99], [2, 1] + [99] * 6]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1] + [0] * 6]
    assert packed["segment_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, -1], [0, 0] + [-1] * 6]
    assert packed["visible_until"].tolist() == [[4, 4, 4, 4, 7, 7, 7, 8], [2, 2, 3, 4, 5, 6, 7, 8]]
    assert packed["action_mask"].tolist() == [[1, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0]]
    assert packed["sample_logp"].tolist() == [[-1, 0, -2, 0, 0, -0.5, 0], [-3, 0, 0, 0, 0, 0, 0]]
    assert packed.actions.source.tolist() == [5, 0, 2, 8]
    assert packed.actions.trajectory.tolist() == [0, 1, 1, 2]
    for name in ("ids", "position_ids", "segment_ids", "visible_until"):
        assert packed[name].dtype == torch.int64
    assert packed.action_mask.dtype == packed.sample_logp.dtype == torch.float32
    with pytest.raises(KeyError, match="no field 'reward'"):
        packed["reward"]


def test_row_lengths() -> None:
    trajs = random_trajectories(0, 6, 12)
    total = sum(t.num_tokens for t in trajs)
    assert pack_sequences(trajs, 100).ids.shape == (1, 100)
    assert pack_sequences(trajs, 100, pad_to=None).ids.shape == (1, total)
    assert pack_sequences(trajs, 100, pad_to=64).ids.shape == (1, -(-total // 64) * 64)
    assert pack_sequences([], 100).ids.shape == (0, 100)
    assert pack_sequences([], 100).action_mask.shape == (0, 99)
    empty = pack_sequences([], 100, pad_to=None)
    assert (empty.ids.shape, empty.action_mask.shape, len(empty.actions)) == ((0, 0), (0, 0), 0)
    assert unpack(empty.ids, empty) == []


def test_split_gives_unpadded_rows() -> None:
    trajs = random_trajectories(1, 9, 12)
    packed = pack_sequences(trajs, 20, pad_to=None)
    rows = packed.split()
    assert len(rows) == len(packed.rows) > 1
    for members, row in zip(packed.rows, rows, strict=True):
        alone = pack_sequences([trajs[i] for i in sorted(members)], 20, pad_to=None)
        order = torch.tensor(sorted(members))
        for name in ("ids", "position_ids", "segment_ids", "visible_until", "action_mask", "sample_logp"):
            assert torch.equal(row[name], alone[name])
        assert torch.equal(row.actions.trajectory, order[alone.actions.trajectory])
        assert torch.equal(row.actions.source, alone.actions.source)
        parts = unpack(row.ids, row)
        assert [len(p) for p in parts] == [t.num_tokens if i in members else 0 for i, t in enumerate(trajs)]
    assert torch.equal(
        packed.actions.source % packed.ids.shape[1], pack_sequences(trajs, 20).actions.source % 20
    )


def test_overflow() -> None:
    trajs = random_trajectories(2, 4, 8)
    long = trajectory(list(range(1, 31)), torch.Generator().manual_seed(0))
    trajs.insert(1, long)
    with pytest.raises(ValueError, match="trajectory 1 has 30 tokens but a row holds 16"):
        pack_sequences(trajs, 16)
    solo = pack_sequences(trajs, 16, overflow="solo", pad_to=None)
    assert_exact(solo, trajs, 30)
    assert [1] in solo.rows
    drop = pack_sequences(trajs, 16, overflow="drop")
    assert sorted(i for row in drop.rows for i in row) == [0, 2, 3, 4]
    assert [len(p) for p in unpack(drop.ids, drop)] == [
        0 if i == 1 else t.num_tokens for i, t in enumerate(trajs)
    ]
    assert 1 not in drop.actions.trajectory
    cut = pack_sequences(trajs, 16, overflow="truncate")
    short = Trajectory(long.ids[:16], long.action_mask[:15], long.sample_logp[:15], 0.0)
    assert_exact(cut, [short if i == 1 else t for i, t in enumerate(trajs)], 16)
    assert solo.overflowed == drop.overflowed == cut.overflowed == [1]


def test_unknown_logp_stays_unknown() -> None:
    generator = torch.Generator().manual_seed(0)
    trajs = [trajectory([1, 2, 3, 4, 5], generator), trajectory([1, 2, 3, 4, 5, 6], generator, known=False)]
    packed = pack_sequences(trajs, 16)
    assert torch.equal(packed.actions.sample_logp.isnan(), packed.actions.trajectory == 1)
    assert not packed.sample_logp[packed.action_mask == 0].isnan().any()


def test_unpack_follows_input_order_and_gradients() -> None:
    trajs = random_trajectories(3, 7, 12)
    packed = pack_sequences(trajs, 15)
    values = torch.randn(*packed.ids.shape, 3, dtype=torch.float64, requires_grad=True)
    parts = unpack(values, packed)
    assert [p.shape for p in parts] == [(t.num_tokens, 3) for t in trajs]
    torch.cat(parts).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad[..., 0], (packed.segment_ids >= 0).double())
    per_action = unpack(packed.actions.target, packed)
    for t, targets in zip(trajs, per_action, strict=True):
        assert torch.equal(targets, t.ids[1:][t.action_mask == 1])
    with pytest.raises(ValueError, match="values must be"):
        unpack(torch.zeros(len(packed.actions) + 1), packed)


def test_moves_to_a_device() -> None:
    packed = pack_sequences(random_trajectories(4, 3, 9), 20).to("meta")
    for field in fields(packed):
        value = packed[field.name]
        if isinstance(value, Tensor):
            assert value.device.type == "meta"
    assert packed.actions.source.device.type == "meta"


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 0), ("pad_to", 0), ("pad_to", "bin")])
def test_wrong_arguments(name: str, value: object) -> None:
    arguments: dict = {"max_tokens": 16, name: value}
    with pytest.raises(ValueError, match=name):
        pack_sequences(random_trajectories(0, 2, 9), **arguments)


def test_a_leaky_visibility_would_be_caught() -> None:
    trajs = random_trajectories(5, 4, 9)
    packed = pack_sequences(trajs, 32)
    packed.visible_until[packed.segment_ids == 0] += 1
    with pytest.raises(AssertionError):
        assert_exact(packed, trajs, 32)


def test_numpy_integers_are_whole_numbers() -> None:
    assert pack_sequences(random_trajectories(0, 2, 9), np.int64(32)).ids.shape == (1, 32)  # type: ignore[arg-type]
