"""Who computes what of a step: ranks share what it costs them, by the model's own shape."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl import RLConfig, Trajectory
from agentrl.models.policy import Policy
from agentrl.models.shape import shape_of
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.train.config import Packing
from agentrl.train.rows import plan_step

# Attention makes the first costlier than all others together; by tokens it is a third of them.
LENGTHS = [400, *[50] * 16]
CFG = RLConfig(microbatch_tokens=1200, max_tokens=400)


def trajectories() -> list[Trajectory]:
    return [
        Trajectory(torch.arange(n) + i * 1000, torch.ones(n - 1), torch.zeros(n - 1), 0.0)
        for i, n in enumerate(LENGTHS)
    ]


def tiny() -> TinyAgent:
    return TinyAgent(TinyConfig(vocab_size=5, width=8, num_layers=2, num_heads=2))


def qwen() -> Policy:
    transformers = pytest.importorskip("transformers")
    from agentrl.models.hf import HFPolicy

    shape = transformers.Qwen3Config(
        vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    return HFPolicy(transformers.Qwen3ForCausalLM(shape))


def parts(policy: Policy, cfg: RLConfig, num_ranks: int = 2) -> list[list[list[int]]]:
    """The lengths in each microbatch of each rank, the rank with the longest first."""
    plan = plan_step(policy, trajectories(), cfg, num_ranks)
    ranks = [[[LENGTHS[i] for i in slot] for slot in rank] for rank in plan.ranks]
    return sorted(ranks, key=lambda rank: -max(map(max, rank)))


@pytest.mark.parametrize("packing", ["packed", "tree"])
@pytest.mark.parametrize("make", [tiny, qwen])
def test_ranks_share_what_attention_costs(packing: Packing, make: Any) -> None:
    policy, cfg = make(), replace(CFG, packing=packing)
    assert parts(policy, cfg) == [[[400]], [[50] * 16]]
    assert parts(policy, replace(cfg, planning_cost="tokens")) == [[[400, *[50] * 4]], [[50] * 12]]
    assert parts(policy, cfg, num_ranks=1) == [[LENGTHS]]


def test_a_model_without_a_shape_is_planned_by_tokens(bigram: Any) -> None:
    assert shape_of(bigram()) is None
    assert parts(bigram(), CFG) == [[[400, *[50] * 4]], [[50] * 12]]


def test_the_shape_of_a_tiny_agent_counts_its_matrices() -> None:
    policy = TinyAgent(TinyConfig(vocab_size=11, width=12, num_layers=3, num_heads=2))
    shape = shape_of(policy)
    assert shape is not None
    matrices = sum(
        p.numel() for name, p in policy.named_parameters() if p.ndim == 2 and "position" not in name
    )
    assert shape.total_parameters == matrices
    assert (shape.num_full_layers, shape.num_heads, shape.head_dim) == (3, 2, 6)


def test_layers_of_unknown_cost_have_no_shape() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=5, hidden_size=8, num_hidden_layers=1)

    class Wrapped:
        module = torch.nn.Module()

    Wrapped.module.config = config
    assert shape_of(Wrapped()) is None  # type: ignore[arg-type]
