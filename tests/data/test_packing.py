import time
import tracemalloc
from dataclasses import fields, replace

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


def forest_of(seed: int, num: int, alphabet: int = 2, longest: int = 12) -> list[Trajectory]:
    """Trajectories over few ids: shared prefixes at any depth, duplicates, some a prefix of others."""
    generator = torch.Generator().manual_seed(seed)
    trajs: list[Trajectory] = []
    for _ in range(num):
        start: list[int] = []
        if trajs:
            old = trajs[int(torch.randint(len(trajs), (1,), generator=generator))].ids.tolist()
            start = old[: int(torch.randint(len(old) + 1, (1,), generator=generator))]
        new = int(torch.randint(0 if start else 1, longest, (1,), generator=generator))
        ids = [*start, *torch.randint(alphabet, (new,), generator=generator).tolist()]
        trajs.append(trajectory(ids[: 2 * longest], generator))
    return trajs


def distinct_prefixes(trajs: list[Trajectory]) -> int:
    return len({tuple(t.ids[: n + 1].tolist()) for t in trajs for n in range(t.num_tokens)})


@given(st.integers(0, 10_000), st.integers(0, 9), st.sampled_from(["row", None, 1, 8]))
@settings(max_examples=40, deadline=None)
def test_flat_rows(seed: int, num: int, pad_to: int | None) -> None:
    trajs = random_trajectories(seed, num, 12)
    packed = pack_sequences(trajs, 16, pad_to=pad_to)  # type: ignore[arg-type]
    assert_exact(packed, trajs, 16)
    assert packed.rows == pack_lengths([t.num_tokens for t in trajs], 16, algorithm="first_fit_decreasing")
    assert packed.num_tokens == sum(t.num_tokens for t in trajs)


@given(st.integers(0, 10_000), st.integers(0, 10), st.integers(24, 60), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_tree_rows(seed: int, num: int, max_tokens: int, alphabet: int) -> None:
    trajs = forest_of(seed, num, alphabet)
    packed = pack_sequences(trajs, max_tokens, share_prefixes=True)
    assert_exact(packed, trajs, max_tokens)
    used = (packed.segment_ids >= 0).sum(1).tolist()
    assert used == [distinct_prefixes([trajs[i] for i in row]) for row in packed.rows]
    for row, segments in zip(packed.rows, packed.segment_ids, strict=True):
        assert int(segments.max()) + 1 == len({int(trajs[i].ids[0]) for i in row})
    whole = pack_sequences(trajs, 10_000, share_prefixes=True, pad_to=None)
    assert whole.num_tokens == whole.ids.numel() == distinct_prefixes(trajs)
    for row, alone in zip(packed.split(), packed.rows, strict=True):
        assert row.actions.trajectory.unique().tolist() == sorted(i for i in alone if trajs[i].num_actions)


def test_the_layout_of_a_tree() -> None:
    shared = [1, 2, 3]
    trajs = [
        # its first action token stands right at the branch: the prefix's last position predicts it
        Trajectory(
            torch.tensor([*shared, 7, 8]), torch.tensor([0.0, 0, 1, 1]), torch.tensor([0, 0, -0.1, -0.2]), 0.0
        ),
        # another tree, between the two
        Trajectory(torch.tensor([9, 9]), torch.tensor([1.0]), torch.tensor([-0.3]), 0.0),
        # branches inside the prefix's action: token 3 is an action here and a prompt token above
        Trajectory(
            torch.tensor([*shared, 5, 8]), torch.tensor([0.0, 1, 1, 0]), torch.tensor([0, -0.4, -0.5, 0]), 0.0
        ),
        # a prefix of both, and a duplicate
        Trajectory(torch.tensor(shared), torch.tensor([0.0, 1]), torch.tensor([0, -0.6]), 0.0),
        Trajectory(torch.tensor([9, 9]), torch.tensor([1.0]), torch.tensor([-0.7]), 0.0),
    ]
    packed = pack_sequences(trajs, 12, share_prefixes=True)
    assert packed.rows == [[3, 2, 0, 1, 4]]
    assert packed.ids.tolist() == [[1, 2, 3, 5, 8, 7, 8, 9, 9, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 0, 1, 0, 0, 0]]
    assert packed.visible_until.tolist() == [[7, 7, 7, 5, 5, 7, 7, 9, 9, 10, 11, 12]]
    assert packed.segment_ids.tolist() == [[0] * 7 + [1] * 2 + [-1] * 3]
    actions = packed.actions
    assert actions.trajectory.tolist() == [0, 0, 1, 2, 2, 3, 4]
    assert actions.offset.tolist() == [2, 3, 0, 1, 2, 1, 0]
    assert actions.source.tolist() == [2, 5, 7, 1, 2, 1, 7]
    assert actions.target.tolist() == [7, 8, 9, 3, 5, 3, 9]
    assert torch.equal(actions.sample_logp, -torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]))
    # what the row itself can say: its next token, for the first sharer; not the 7 at the second branch
    assert packed.action_mask.tolist() == [[0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0]]
    assert packed.sample_logp[0, [1, 2, 5, 7]].tolist() == pytest.approx([-0.4, -0.5, -0.2, -0.3])


def group_of_eight(interleaved: bool) -> list[Trajectory]:
    """4 groups of 8: a prompt of 1024 tokens, responses of 512."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 50_000, (4, 1024), generator=generator)
    trajs: list[Trajectory] = []
    for index in range(32):
        response = torch.randint(2, 50_000, (512,), generator=generator)
        mask = torch.cat([torch.zeros(1023), torch.ones(512)])
        ids = torch.cat([prompts[index % 4 if interleaved else index // 8], response])
        trajs.append(Trajectory(ids, mask, -mask, 0.0))
    return trajs


@pytest.mark.parametrize("interleaved", [False, True])
def test_groups_compute_their_prompt_once(interleaved: bool) -> None:
    trajs = group_of_eight(interleaved)
    assert pack_sequences(trajs, 8192, pad_to=None).num_tokens == 49_152
    packed = pack_sequences(trajs, 8192, share_prefixes=True, pad_to=None)
    assert packed.num_tokens == 20_480
    assert len(packed.actions) == 32 * 512
    for t, targets in zip(trajs, unpack(packed.actions.target, packed), strict=True):
        assert torch.equal(targets, t.ids[1024:])


def test_a_system_prompt_shared_by_all_tasks_is_a_level_of_its_own() -> None:
    system, none = torch.ones(300, dtype=torch.int64), torch.zeros(300)
    trajs = [
        replace(
            t,
            ids=torch.cat([system, t.ids]),
            action_mask=torch.cat([none, t.action_mask]),
            sample_logp=torch.cat([none, t.sample_logp]),
        )
        for t in group_of_eight(True)
    ]
    packed = pack_sequences(trajs, 30_000, share_prefixes=True, pad_to=None)
    assert packed.num_tokens == 300 + 20_480


def test_a_tree_larger_than_a_row_repeats_the_prefix_as_rarely_as_can_be() -> None:
    trajs = group_of_eight(False)[:8]
    packed = pack_sequences(trajs, 4096, share_prefixes=True)
    assert sorted(map(len, packed.rows)) == [2, 6]  # a row of 4096 has room for the prompt and 6 responses
    assert packed.num_tokens == 2 * 1024 + 8 * 512
    assert pack_sequences(trajs, 1536, share_prefixes=True).num_tokens == 8 * 1536


def test_trees_with_overflow() -> None:
    trajs = forest_of(3, 8)
    generator = torch.Generator().manual_seed(0)
    trajs.insert(2, trajectory([*trajs[0].ids.tolist(), *range(60)], generator))
    solo = pack_sequences(trajs, 40, share_prefixes=True, overflow="solo")
    assert_exact(solo, trajs, trajs[2].num_tokens)
    assert [2] in solo.rows
    drop = pack_sequences(trajs, 40, share_prefixes=True, overflow="drop")
    assert 2 not in [i for row in drop.rows for i in row]
    cut = pack_sequences(trajs, 40, share_prefixes=True, overflow="truncate")
    long = trajs[2]
    trajs[2] = Trajectory(long.ids[:40], long.action_mask[:39], long.sample_logp[:39], 0.0)
    assert_exact(cut, trajs, 40)
    assert solo.overflowed == drop.overflowed == cut.overflowed == [2]
    nothing = pack_sequences([long], 4, share_prefixes=True, overflow="drop")
    assert (nothing.rows, len(nothing.actions), nothing.lengths.tolist()) == ([], 0, [0])


def hidden_states(weights: list[Tensor], ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
    """A float64 transformer with dense attention: [L, D] for one row."""
    embedding, place, *layers = weights
    x = embedding[ids] + torch.sin((position_ids[:, None] + 1) * place)
    for w in layers:
        q, k, v = (x @ w).chunk(3, dim=-1)
        x = x + torch.softmax((q @ k.T).masked_fill(~mask, -torch.inf), dim=-1) @ v
    return x


def loss_and_gradients(
    packed: PackedBatch, weights: list[Tensor], position_ids: Tensor, visible: Tensor
) -> list[Tensor]:
    rows = zip(packed.ids, position_ids, visible, strict=True)
    hidden = torch.cat([hidden_states(weights, ids, place, readable(v)) for ids, place, v in rows])
    logits = hidden[packed.actions.source] @ weights[0].T
    logp = torch.log_softmax(logits, -1).gather(-1, packed.actions.target[:, None])[:, 0]
    weight = 1.0 / (2 + packed.actions.trajectory + packed.actions.offset)
    return [logp.detach(), *torch.autograd.grad((weight * logp).sum(), weights)]


def relative_error(ours: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


def test_log_probs_and_gradients_equal_each_trajectory_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(50, 6), (6,), (6, 18), (6, 18)]
    weights = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    for trajs in (random_trajectories(6, 9, 14), forest_of(6, 12), forest_of(7, 12, 4)):
        alone = pack_sequences(trajs, 1, overflow="solo")
        exact = loss_and_gradients(alone, weights, alone.position_ids, alone.visible_until)
        for share in (False, True):
            packed = pack_sequences(trajs, 40, share_prefixes=share)
            ours = loss_and_gradients(packed, weights, packed.position_ids, packed.visible_until)
            assert relative_error(ours, exact) < 1e-10
            # the two classic bugs: a causal mask with running and with restarted positions
            causal = torch.full_like(packed.visible_until, 40)
            running = torch.arange(40).expand_as(packed.ids)
            assert relative_error(loss_and_gradients(packed, weights, running, causal), exact) > 1e-2
            assert (
                relative_error(loss_and_gradients(packed, weights, packed.position_ids, causal), exact) > 1e-2
            )


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


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 0), ("pad_to", 0), ("pad_to", "bin"), ("overflow", "cut")]
)
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


def test_a_branch_predicted_by_its_neighbour_in_the_row_would_be_caught() -> None:
    trajs = forest_of(5, 8)
    packed = pack_sequences(trajs, 100, share_prefixes=True)
    assert_exact(packed, trajs, 100)
    token = (packed.lengths.cumsum(0) - packed.lengths)[packed.actions.trajectory] + packed.actions.offset + 1
    packed.actions.source.copy_(packed.token_index[token] - 1)
    with pytest.raises(AssertionError):
        assert_exact(packed, trajs, 100)


def test_numpy_integers_are_whole_numbers() -> None:
    assert pack_sequences(random_trajectories(0, 2, 9), np.int64(32)).ids.shape == (1, 32)  # type: ignore[arg-type]


def test_a_million_tokens_take_vectors_not_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(50_000, (8, 4096), generator=generator)
    trajs = []
    for index in range(200):
        ids = torch.cat([prompts[index % 8], torch.randint(50_000, (1000,), generator=generator)])
        mask = (torch.arange(1, ids.numel()) >= 4096).float()
        trajs.append(Trajectory(ids, mask, -mask, 0.0))
    total = sum(t.num_tokens for t in trajs)
    tracemalloc.start()
    start = time.process_time()
    packed = pack_sequences(trajs, 2**20, share_prefixes=True, pad_to=None)
    assert time.process_time() - start < 1  # 0.11 on an idle core
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 1_000_000
    assert packed.ids.shape == (1, 8 * 4096 + 200 * 1000)
    assert peak < 64 * total  # bytes, 40 measured; one mask of this row would take 54 GB


@pytest.mark.parametrize("pad_id", [True, 0.5, -1, None, 2**63])
def test_a_pad_id_that_is_no_token_id_is_refused(pad_id: object) -> None:
    with pytest.raises(ValueError, match="pad_id must be a token id"):
        pack_sequences([], 8, pad_id=pad_id)  # type: ignore[arg-type]


def test_lengths_in_bfloat16_give_the_same_plan() -> None:
    assert pack_lengths(torch.tensor([2.0, 3.0], dtype=torch.bfloat16), 8) == pack_lengths([2, 3], 8)
