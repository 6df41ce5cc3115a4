"""The update, against a float64 computation written out token by token."""

import copy
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from agentrl import RLConfig, accumulate, collate, compute_advantages, rl_update
from agentrl.models.policy import Head
from agentrl.models.scoring import sequence_log_probs, sequence_scores
from agentrl.train.metrics import Max, Mean
from agentrl.train.objective import TokenTargets, UpdateMetrics, surrogate_losses, token_statistics
from agentrl.train.rows import DealtPlan, TokenScores

CONFIGS = [
    RLConfig(num_minibatches=1),
    RLConfig(num_epochs=3, num_minibatches=3, lr=0.05, temperature=0.7),
    RLConfig(num_epochs=2, lr=0.05, loss_mode="grpo", clip_low=0.1, clip_high=0.3, kl_coef=0.2),
    RLConfig(num_epochs=2, lr=0.05, entropy_coef=0.3, temperature=0.7),
    RLConfig(num_epochs=2, lr=0.05, loss_mode="grpo", entropy_coef=0.3, kl_coef=0.2),
    RLConfig(num_epochs=2, lr=0.05, loss_mode="dr_grpo", norm_const=10, kl_coef=0.1, max_grad_norm=0.05),
]


def by_hand(
    model: Any, reference: Any, trajs: list[Any], advantages: list[float], cfg: RLConfig
) -> dict[str, Any]:
    """Multi-epoch clipped updates in plain Python: a loop over tokens, and Adam from its formula."""
    embedding, weight = model.embedding.detach().clone(), model.weight.detach().clone()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in (embedding, weight)]
    generator, num_steps = torch.Generator().manual_seed(3), 0
    entropies, ratios, clipped, losses, norms = [], [], [], [], []
    for _ in range(cfg.num_epochs):
        for part in torch.randperm(len(trajs), generator=generator).tensor_split(cfg.num_minibatches):
            embedding.requires_grad_()
            weight.requires_grad_()
            total = sum(trajs[i].num_actions for i in part)
            loss = 0 * (embedding.sum() + weight.sum())  # a part may be clipped as a whole
            for i in part.tolist():
                t = trajs[i]
                share = {
                    "token_mean": 1 / total,
                    "grpo": 1 / (len(part) * t.num_actions),
                    "dr_grpo": 1 / (len(part) * (cfg.norm_const or 1)),
                }[cfg.loss_mode]
                for k in range(t.num_tokens - 1):
                    if t.action_mask[k] == 0:
                        continue
                    now, after = int(t.ids[k]), int(t.ids[k + 1])
                    logps = torch.log_softmax(weight @ embedding[now] / cfg.temperature, 0)
                    ratio = torch.exp(logps[after] - float(t.sample_logp[k]))
                    a = advantages[i]
                    bound = 1 + cfg.clip_high if a > 0 else 1 - cfg.clip_low
                    is_clipped = (a > 0 and ratio.item() > bound) or (a < 0 and ratio.item() < bound)
                    loss = loss - share * a * (bound if is_clipped else ratio)
                    if cfg.kl_coef:
                        ref = torch.log_softmax(
                            reference.weight @ reference.embedding[now] / cfg.temperature, 0
                        )
                        gap = ref[after].detach() - logps[after]
                        loss = loss + share * cfg.kl_coef * (torch.exp(gap) - 1 - gap)
                    entropy = -(logps.exp() * logps).sum()
                    loss = loss - share * cfg.entropy_coef * entropy
                    ratios.append(ratio.item())
                    clipped.append(is_clipped)
                    entropies.append(entropy.item())
            grads = torch.autograd.grad(loss, (embedding, weight))
            norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
            num_steps += 1
            updated = []
            for p, g, (first, second) in zip((embedding, weight), grads, moments, strict=True):
                g = g * min(1.0, cfg.max_grad_norm / (norm + 1e-6))
                first.mul_(cfg.betas[0]).add_((1 - cfg.betas[0]) * g)
                second.mul_(cfg.betas[1]).add_((1 - cfg.betas[1]) * g * g)
                scale = second.div(1 - cfg.betas[1] ** num_steps).sqrt() + 1e-8
                updated.append(p.detach() - cfg.lr * first / (1 - cfg.betas[0] ** num_steps) / scale)
            embedding, weight = updated
            losses.append(loss.item())
            norms.append(norm)
    return {
        "embedding": embedding,
        "weight": weight,
        "loss": sum(losses) / len(losses),
        "grad_norm": sum(norms) / len(norms),
        "entropy": sum(entropies) / len(entropies),
        "ratio_mean": sum(ratios) / len(ratios),
        "ratio_max": max(ratios),
        "clip_frac": sum(clipped) / len(clipped),
    }


CASES = ["one step", "token_mean", "grpo with KL", "entropy bonus", "KL and bonus", "dr_grpo with KL"]


@pytest.mark.parametrize("cfg", CONFIGS, ids=CASES)
def test_update_equals_a_computation_by_hand(cfg: RLConfig, bigram: Any, make_trajs: Any) -> None:
    model, reference = bigram(dtype=torch.float64), bigram(seed=1, dtype=torch.float64)
    trajs = make_trajs(model, 16, temperature=cfg.temperature)
    batch = collate(trajs, pad_id=0)
    advantages = compute_advantages({"reward": batch["reward"].double(), "group": batch["group"]}, cfg)
    want = by_hand(model, reference, trajs, advantages.tolist(), cfg)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=cfg.betas)
    got = rl_update(model, optimizer, batch, advantages, cfg, reference, torch.Generator().manual_seed(3))
    for name in ("embedding", "weight"):
        torch.testing.assert_close(getattr(model, name).detach(), want[name], rtol=1e-10, atol=1e-12)
    for name in ("loss", "grad_norm", "entropy", "ratio_mean", "ratio_max", "clip_frac"):
        assert got[name] == pytest.approx(want[name], rel=1e-9, abs=1e-12), name
    assert ("kl" in got) == (cfg.kl_coef > 0)
    assert got["tokens"] == sum(t.num_actions for t in trajs)
    if cfg.num_epochs > 1:
        assert got["clip_frac"] > 0, "the case must reach the clip to test it"


def test_scores_are_those_of_the_reference_and_entropies_exact(bigram: Any) -> None:
    model, ids = bigram(dtype=torch.float64), torch.tensor([[1, 2, 3], [4, 5, 6]])
    logp, entropy = sequence_scores(model, ids, temperature=0.7)
    assert torch.equal(logp, sequence_log_probs(model, ids, temperature=0.7))
    logits = model.embedding[ids[:, :-1]] @ model.weight.T / 0.7
    want = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy, want)
    grads = [torch.autograd.grad(value.sum(), list(model.parameters())) for value in (entropy, want)]
    for got, exact in zip(*grads, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("fused", [True, False])
def test_an_id_that_cannot_be_sampled_adds_nothing_to_the_entropy(
    bigram: Any, make_trajs: Any, monkeypatch: pytest.MonkeyPatch, packing: Any, fused: bool
) -> None:
    monkeypatch.setattr("agentrl.train.rows.FUSED_HEAD_SIZE", 0 if fused else 1 << 30)
    model = bigram(dtype=torch.float64)
    trajs = [t for t in make_trajs(model, 9) if not bool((t.ids == 0).any())]
    assert trajs
    found: list[tuple[torch.Tensor, float]] = []
    for bias in (torch.tensor([-torch.inf, 0, 0, 0, 0, 0, 0], dtype=torch.float64), None):
        twin = copy.deepcopy(model)
        if bias is not None:
            twin.head = lambda weight=twin.weight, bias=bias: Head(weight, bias)
        else:  # the same ids without the first
            twin.head = lambda weight=twin.weight: Head(weight[1:])
            trajs = [replace(t, ids=torch.where(t.ids > 0, t.ids - 1, 0)) for t in trajs]
            twin.embedding = torch.nn.Parameter(twin.embedding[1:].detach())
        cfg = RLConfig(entropy_coef=0.5, packing=packing)
        plan = DealtPlan([[list(range(len(trajs)))]])
        metrics = accumulate(twin, trajs, torch.ones(len(trajs)), cfg, plan)
        assert twin.weight.grad is not None
        found.append((twin.weight.grad, metrics.entropy.total))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-10, atol=1e-14)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-12)


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    logp, old, entropy, advantages = torch.randn(4, 11, generator=generator, dtype=torch.float64)
    cfg = RLConfig(kl_coef=0.5)

    def part(index: slice) -> tuple[float, UpdateMetrics]:
        targets = TokenTargets(
            old[index],
            advantages[index],
            torch.full_like(old[index], 1 / 11),
            ref_logp=-entropy[index],
        )
        scores = TokenScores(logp[index], entropy[index])
        loss = surrogate_losses(scores, targets, cfg).sum()
        return loss.item(), token_statistics(scores, targets, cfg)

    whole_loss, whole = part(slice(None))
    parts = [part(slice(a, b)) for a, b in ((0, 1), (1, 7), (7, 7), (7, 11))]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole_loss, rel=1e-12)
    added = sum((metrics for _, metrics in parts), UpdateMetrics())
    assert added.values() == pytest.approx(whole.values(), rel=1e-12)
    assert {f.name for f in fields(UpdateMetrics)} - set(added.values()) == {
        "loss",
        "grad_norm",
        "distortion",
    }
    # the planted bug: a mean of means is another number
    local = sum(m.entropy.value or 0.0 for _, m in parts) / 4
    assert abs(local - (whole.entropy.value or 0.0)) > 1e-3


def test_empty_metrics_have_no_value() -> None:
    assert Mean().value is None
    assert Max().value is None
    assert Mean.of(torch.zeros(0)).value is None


def test_rows_without_actions_change_nothing(bigram: Any, make_trajs: Any) -> None:
    model = bigram(dtype=torch.float64)
    batch = collate(make_trajs(model, 6), pad_id=0)
    batch["action_mask"][2] = batch["sample_logp"][2] = 0
    advantages = torch.tensor([1.0, -1, 5, -1, 1, 2], dtype=torch.float64)
    keep = torch.tensor([0, 1, 3, 4, 5])
    results = []
    for rows, adv in ((batch, advantages), ({k: v[keep] for k, v in batch.items()}, advantages[keep])):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
        rl_update(twin, optimizer, rows, adv, RLConfig(), None, torch.Generator().manual_seed(0))
        results.append(twin.weight.detach())
    assert torch.equal(*results)


def test_same_generator_seed_gives_the_same_bits(bigram: Any, make_trajs: Any) -> None:
    trajs = make_trajs(bigram(), 8)
    weights = []
    for seed in (5, 5, 6):
        model = bigram()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        batch, advantages = collate(trajs, pad_id=0), torch.tensor([1.0, -1] * 4)
        rl_update(model, optimizer, batch, advantages, RLConfig(), None, torch.Generator().manual_seed(seed))
        weights.append(model.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b, a: b["action_mask"].zero_(), "nothing to learn from"),
        (lambda b, a: a.__setitem__(1, math.nan), r"trajectories \[1\] are not"),
        (lambda b, a: b["sample_logp"].__setitem__(2, math.nan), r"sample_logp of trajectories \[2\]"),
        (lambda b, a: a.mul_(1e38).mul_(1e3), "advantages must be finite"),
    ],
)
def test_a_bad_batch_is_refused_and_nothing_moves(
    bigram: Any, make_trajs: Any, spoil: Any, message: str
) -> None:
    model = bigram()
    before = copy.deepcopy(model.state_dict())
    batch, advantages = collate(make_trajs(model, 4), pad_id=0), torch.tensor([1.0, -1, 1, -1])
    spoil(batch, advantages)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        rl_update(model, optimizer, batch, advantages, RLConfig(), None, torch.Generator())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_small_model_is_updated_with_one_thread(
    bigram: Any, make_trajs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would wait for each other at every product, beside other load four times as long as one works."""
    model, seen = bigram(), set[int]()
    plain = model.hidden_states
    monkeypatch.setattr(
        model, "hidden_states", lambda *args: [seen.add(torch.get_num_threads()), plain(*args)][1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        batch = collate(make_trajs(model, 8), pad_id=0)
        rl_update(model, optimizer, batch, torch.tensor([1.0, -1] * 4), RLConfig(), None, None)
        assert (seen, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_a_loss_that_is_not_finite_takes_no_step(bigram: Any, make_trajs: Any) -> None:
    model = bigram()
    batch, advantages = collate(make_trajs(model, 4), pad_id=0), torch.tensor([1.0, -1, 1, -1])
    with torch.no_grad():
        model.weight[3] = math.nan
    before = model.embedding.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"this optimizer step was not taken\..* need an lr below 0\.1 from"):
        rl_update(model, optimizer, batch, advantages, RLConfig(), None, torch.Generator())
    assert torch.equal(before, model.embedding)
    assert optimizer.state == {}


def test_missing_reference_and_wrong_shape_are_refused(bigram: Any, make_trajs: Any) -> None:
    model = bigram()
    batch = collate(make_trajs(model, 4), pad_id=0)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="needs a ref_model"):
        rl_update(model, optimizer, batch, torch.ones(4), RLConfig(kl_coef=0.1), None, torch.Generator())
    with pytest.raises(ValueError, match=r"advantages must have shape \(4,\)"):
        rl_update(model, optimizer, batch, torch.ones(3), RLConfig(), None, torch.Generator())
