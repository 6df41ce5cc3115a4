"""What a step records of its batch for the report: positions in every layout, and a picture of the rows."""

# R rows, L row length, n tokens of one trajectory

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.data.packing import PackedBatch, pack_sequences
from agentrl.data.prefix_tree import prefix_forest
from agentrl.data.trajectory import Trajectory

FORMAT = 1
_MOST_TRAJECTORIES = 64  # in a picture; more cannot be told apart
_PADDING, _PROMPT, _TOOL, _ACTION = range(4)
_KINDS = ("padding", "prompt", "tool", "action")


def position_counts(sampled: Sequence[Trajectory], kept: Sequence[Trajectory]) -> dict[str, int]:
    """Positions that a step computes, and those that it would compute without each saving.

        sampled_actions          tokens that the policy sampled, in all trajectories
        positions_sampled_padded all sampled trajectories, padded to the longest
        positions_padded         the trajectories to learn from (`kept`), padded to their longest
        positions_packed         the same without padding
        positions_tree           the same with every shared prefix once
        actions_tree             how many of those are action tokens
        positions_decoded        positions that went through the model while sampling
        positions_uncached       the same, had every sampled token read its whole prefix anew

    The last two are absent where the sampler did not count (info 'num_computed').
    """
    forest = prefix_forest([t.ids for t in kept])
    own = zip(forest.members.tolist(), forest.shared.tolist(), strict=True)
    counts = {
        "sampled_actions": sum(t.num_actions for t in sampled),
        "positions_sampled_padded": len(sampled) * max((t.num_tokens for t in sampled), default=0),
        "positions_padded": len(kept) * max((t.num_tokens for t in kept), default=0),
        "positions_packed": sum(t.num_tokens for t in kept),
        "positions_tree": forest.num_tokens,
        "actions_tree": sum(int(kept[i].action_mask[max(shared - 1, 0) :].sum()) for i, shared in own),
    }
    computed = [t.info["num_computed"] for t in sampled if "num_computed" in t.info]
    if len(computed) == len(sampled):
        counts["positions_decoded"] = sum(computed)
        # ids[t + 1] is sampled from a prefix of t + 1 tokens
        counts["positions_uncached"] = sum(int((t.action_mask.nonzero() + 1).sum()) for t in sampled)
    return counts


def batch_picture(trajs: Sequence[Trajectory], step: int, row_tokens: int, vocab_size: int) -> dict[str, Any]:
    """JSON of how the first 64 of a step's trajectories stand in rows, in three layouts.

    Padded rows are as long as the longest trajectory; the others hold `row_tokens`. `layouts` gives for each
    row its `runs` of [kind, length] (prompt, action, tool or padding) and its `borders`: the positions where
    a sequence, or a branch of a prefix tree, begins. Raises ValueError for a trajectory longer than a row.
    """
    shown = trajs[:_MOST_TRAJECTORIES]
    longest = max((t.num_tokens for t in shown), default=1)
    padded = [row for t in shown for row in _rows([t], pack_sequences([t], longest))]
    return {
        "format": FORMAT,
        "step": step,
        "num_trajectories": len(trajs),
        "num_shown": len(shown),
        "row_tokens": row_tokens,
        "vocab_size": vocab_size,
        "layouts": {
            "padded": padded,
            "packed": _rows(shown, pack_sequences(shown, row_tokens)),
            "tree": _rows(shown, pack_sequences(shown, row_tokens, share_prefixes=True)),
        },
    }


def _rows(trajs: Sequence[Trajectory], packed: PackedBatch) -> list[dict[str, Any]]:
    kinds = np.full(packed.ids.shape, _PADDING)
    flat = kinds.reshape(-1)
    places = packed.token_index.split(packed.lengths.tolist())
    for trajectory, place in zip(trajs, places, strict=True):
        is_action = torch.cat([torch.zeros(1), trajectory.action_mask]) == 1
        seen = is_action.cumsum(0) > 0
        kind = torch.where(is_action, _ACTION, torch.where(seen, _TOOL, _PROMPT))
        flat[place.numpy()] = kind.numpy()
    positions = packed.position_ids.numpy()
    begins = np.ones(kinds.shape, dtype=bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    begins &= packed.segment_ids.numpy() >= 0
    return [
        {"runs": _runs(row), "borders": np.flatnonzero(starts).tolist()}
        for row, starts in zip(kinds, begins, strict=True)
    ]


def _runs(row: NDArray[np.int64]) -> list[list[Any]]:
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    lengths = np.diff(starts, append=row.size)
    return [
        [_KINDS[kind], length] for kind, length in zip(row[starts].tolist(), lengths.tolist(), strict=True)
    ]
