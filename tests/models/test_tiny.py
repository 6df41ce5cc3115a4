"""A TinyAgent with its cache computes what it computes without one."""

import pytest
import torch
from torch import Tensor

from agentrl.models.policy import Policy, head_logits
from agentrl.models.tiny import TinyAgent, TinyCache, TinyConfig


def model_of(dtype: torch.dtype, **shape: int) -> TinyAgent:
    config = {"vocab_size": 13, "width": 16, "num_layers": 2, "num_heads": 2, "max_positions": 24} | shape
    model = TinyAgent(TinyConfig(**config))
    for parameter in model.parameters():  # far from the quiet start, so that errors are not hidden
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model.to(dtype)


def rows(num_rows: int, length: int) -> Tensor:
    return torch.randint(13, (num_rows, length), generator=torch.Generator().manual_seed(2))


def log_probs(model: TinyAgent, hidden: Tensor) -> Tensor:
    return torch.log_softmax(head_logits(model.head(), hidden), -1)


@torch.no_grad()
def ragged_difference(model: TinyAgent, cache: TinyCache) -> float:
    """The largest difference of log-probs: ragged pieces through the cache against whole rows."""
    ids, num_slots = rows(5, 20), 5
    plain = log_probs(model, model.hidden_states(*plain_rows(ids)))
    done, worst, rng = [0] * num_slots, 0.0, torch.Generator().manual_seed(3)
    while min(done) < 20:
        open_rows = [b for b in torch.randperm(num_slots, generator=rng).tolist() if done[b] < 20]
        chosen = open_rows[: max(1, len(open_rows) - 1)]  # seldom all of them, in any order
        sizes = [min(20 - done[b], int(torch.randint(1, 5, (1,), generator=rng))) for b in chosen]
        width = max(sizes)
        block = torch.full((len(chosen), width), 12)
        for i, (b, size) in enumerate(zip(chosen, sizes, strict=True)):
            block[i, :size] = ids[b, done[b] : done[b] + size]
            done[b] += size
        hidden = model.extend(block, torch.tensor(sizes), torch.tensor(chosen), cache)
        got = log_probs(model, hidden)
        wanted = torch.stack([plain[b, done[b] - 1] for b in chosen])
        worst = max(worst, float((got - wanted).abs().max()))
    assert cache.lengths.tolist() == [20] * num_slots
    return worst


def plain_rows(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ids, torch.arange(ids.shape[1]).expand_as(ids), torch.full_like(ids, ids.shape[1])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_cache_agrees_with_no_cache(dtype: torch.dtype, bound: float) -> None:
    model = model_of(dtype)
    assert ragged_difference(model, model.new_cache(5, 20)) < bound


def test_a_cache_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="has 24 positions, fewer than 25 tokens"):
        model_of(torch.float32).new_cache(1, 25)


def test_a_cache_that_is_not_reset_is_noticed() -> None:
    """The planted bug: a slot keeps the tokens of its last episode; reset() makes it as good as new."""
    model = model_of(torch.float64)
    cache, ids, slots = model.new_cache(2, 20), rows(2, 6), torch.arange(2)
    sizes = torch.tensor([6, 6])
    with torch.no_grad():
        first = model.extend(ids, sizes, slots, cache)
        stale = model.extend(ids, sizes, slots, cache)
        cache.reset(slots)
        again = model.extend(ids, sizes, slots, cache)
    assert torch.equal(first, again)
    assert float((stale - first).abs().max()) > 1e-3


def test_a_token_that_sees_the_next_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the cache's mask is off by one."""
    import agentrl.models.tiny as module

    real = module.F.scaled_dot_product_attention

    def leaky(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        return real(q, k, v, attn_mask=attn_mask | attn_mask.roll(1, -1))

    model = model_of(torch.float64)
    monkeypatch.setattr(module.F, "scaled_dot_product_attention", leaky)
    ids = rows(1, 6)
    with torch.no_grad():
        wrong = model.extend(ids, torch.tensor([6]), torch.tensor([0]), model.new_cache(1, 8))
        monkeypatch.undo()
        right = model.extend(ids, torch.tensor([6]), torch.tensor([0]), model.new_cache(1, 8))
    assert float((wrong - right).abs().max()) > 1e-3


@torch.no_grad()
def test_a_copied_slot_continues_like_its_source() -> None:
    model = model_of(torch.float64)
    cache, ids = model.new_cache(3, 20), rows(1, 5)
    model.extend(ids, torch.tensor([5]), torch.tensor([1]), cache)
    cache.copy(1, torch.tensor([0, 2]))
    assert cache.lengths.tolist() == [5, 5, 5]
    hidden = model.extend(
        torch.tensor([[3], [3], [3]]), torch.ones(3, dtype=torch.int64), torch.arange(3), cache
    )
    torch.testing.assert_close(hidden[[0, 2]], hidden[[1, 1]], rtol=1e-12, atol=1e-12)


def test_hidden_states_keep_segments_apart() -> None:
    model = model_of(torch.float64)
    ids = rows(1, 9)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model.hidden_states(ids, position_ids, torch.tensor([[4] * 4 + [9] * 5]))
    for part in (slice(0, 4), slice(4, 9)):
        alone = model.hidden_states(*plain_rows(ids[:, part]))
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-10, atol=1e-12)


def test_it_is_a_policy_with_tied_embeddings_that_its_seed_decides() -> None:
    one, two = (TinyAgent(TinyConfig(vocab_size=9)) for _ in range(2))
    assert isinstance(one, Policy)
    assert one.module is one
    assert one.head().weight is one.token_embedding.weight
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = TinyAgent(TinyConfig(vocab_size=9, init_seed=1))
    assert not torch.equal(one.token_embedding.weight, other.token_embedding.weight)


def test_a_position_beyond_the_last_is_refused() -> None:
    model = model_of(torch.float32)
    with pytest.raises(ValueError, match="position 24 is beyond this TinyAgent's 24 positions"):
        model(rows(1, 25))


@pytest.mark.parametrize(("change", "message"), [
    ({"num_heads": 3}, "width 64 must be a multiple of num_heads 3"),
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
])  # fmt: skip
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyConfig(vocab_size=5, **change)
