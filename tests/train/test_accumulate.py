"""The gradient of an optimizer step is that of the plain full batch, however the step is split."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl import RLConfig, Trajectory, accumulate, aggregate_loss, collate, token_weights
from agentrl.data.weights import MODES, Denominators, step_in_parts
from agentrl.models.scoring import sequence_log_probs
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.log_probs import selected_log_probs
from agentrl.ops.losses import kl_to_reference, policy_loss
from agentrl.train.config import Packing
from agentrl.train.distributed import Ranks, shard_policy
from agentrl.train.metrics import Mean
from agentrl.train.objective import TokenTargets, UpdateMetrics
from agentrl.train.rows import DealtPlan, TokenScores, plan_rows

TEMPERATURE = 0.8
VOCAB = 13


def tiny(seed: int = 0) -> TinyAgent:
    config = TinyConfig(vocab_size=VOCAB, width=8, num_layers=1, num_heads=2, max_positions=32)
    model = TinyAgent(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


MODEL, REFERENCE = tiny(), tiny(1)


@pytest.fixture(autouse=True, scope="module")
def _small_heads_are_fused_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.train.rows.FUSED_HEAD_SIZE", 0)
        yield


# Eleven trajectories on four ranks, one of which has only dummies.
DUMMY_RANK = DealtPlan([[[0, 3], [7, 1, 2]], [[], []], [[4, 5, 6], [8]], [[10, 9], []]])


def make_step(count: int, seed: int) -> tuple[list[Trajectory], Tensor]:
    """Trajectories of three groups with shared prompts and a few episodes of two; some without actions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    trajs: list[Trajectory] = []
    for i in range(count):
        group = i % 3
        ids = torch.cat(
            [torch.arange(group, group + 3), torch.randint(VOCAB, (draw(1, 12),), generator=generator)]
        )
        mask = (torch.rand(len(ids) - 1, generator=generator) < 0.6).float()
        mask[:2] = 0
        if i % 7 == 6:
            mask.zero_()
        logp = mask * (torch.randn(len(mask), generator=generator) * 0.2 - 2.5)
        episode = f"{group}/{i // 6}" if i % 2 else ""
        trajs.append(Trajectory(ids, mask, logp, float(i % 2), group=str(group), episode=episode))
    return trajs, torch.randn(count, generator=generator, dtype=torch.float64)


def full_batch(
    model: TinyAgent, trajs: list[Trajectory], advantages: Tensor, cfg: RLConfig
) -> dict[str, Any]:
    """Loss, gradient and statistics of the step as one padded batch with full logits."""
    model = copy.deepcopy(model)
    batch = collate(trajs, pad_id=0)
    mask, old = batch["action_mask"], batch["sample_logp"].double()
    log_probs = torch.log_softmax(model(batch["ids"])[:, :-1] / cfg.temperature, -1)
    logp = selected_log_probs(log_probs, batch["ids"][:, 1:])
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    per_token = policy_loss(logp, old, advantages[:, None], cfg.clip_low, cfg.clip_high)
    with torch.no_grad():
        reference = sequence_log_probs(REFERENCE, batch["ids"], cfg.temperature)
    kl = kl_to_reference(logp, reference)
    loss = aggregate_loss(
        per_token + cfg.kl_coef * kl - cfg.entropy_coef * entropy,
        mask,
        cfg.loss_mode,
        cfg.norm_const,
        episodes=batch["episode"],
        groups=batch["group"],
    )
    loss.backward()
    here = mask == 1
    ratio = (logp - old).exp().detach()[here]
    sign = advantages[:, None].expand_as(old)[here]
    clipped = ((sign > 0) & (ratio > 1 + cfg.clip_high)) | ((sign < 0) & (ratio < 1 - cfg.clip_low))
    return {
        "grads": gradients(model),
        "loss": loss.item(),
        "entropy": entropy.detach()[here].mean().item(),
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "clip_frac": clipped.double().mean().item(),
        "kl": kl.detach()[here].mean().item(),
    }


def gradients(model: TinyAgent) -> Tensor:
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def config(mode: str, packing: Packing) -> RLConfig:
    parts = {"kl_coef": 0.3, "entropy_coef": 0.2}
    return RLConfig(loss_mode=mode, norm_const=7, packing=packing, temperature=TEMPERATURE, **parts)


def split(count: int, num_microbatches: int, num_ranks: int, seed: int) -> DealtPlan:
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(num_microbatches, (count,), generator=generator).tolist()
    batches = [[i for i in range(count) if place[i] == m] for m in range(num_microbatches)]
    return DealtPlan.deal([batch for batch in batches if batch], num_ranks)


def accumulated(
    trajs: list[Trajectory], advantages: Tensor, cfg: RLConfig, plan: DealtPlan
) -> tuple[Tensor, UpdateMetrics]:
    """What ranks that average their gradients get, each with its own copy of the model."""
    total, metrics = torch.zeros(()), UpdateMetrics()
    for rank in range(len(plan.ranks)):
        model = copy.deepcopy(MODEL)
        metrics += accumulate(model, trajs, advantages, cfg, plan, rank=rank, reference=REFERENCE)
        total = total + gradients(model) / len(plan.ranks)
    return total, metrics


def check_exact(got: tuple[Tensor, UpdateMetrics], want: dict[str, Any], rtol: float = 1e-10) -> None:
    grads, metrics = got
    assert float((grads - want["grads"]).norm() / want["grads"].norm()) < rtol
    assert metrics.loss.total == pytest.approx(want["loss"], rel=1e-10, abs=1e-12)
    values = metrics.values()
    for name in ("entropy", "ratio_mean", "ratio_max", "clip_frac", "kl"):
        assert values[name] == pytest.approx(want[name], rel=1e-10), name


@pytest.mark.parametrize("packing", ["packed", "tree", "padded"])
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(MODES)),
    st.integers(1, 14),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 999),
)
def test_any_split_gives_the_full_batch(
    packing: Packing, mode: str, count: int, num_microbatches: int, num_ranks: int, seed: int
) -> None:
    trajs, advantages = make_step(count, seed)
    if not any(t.num_actions for t in trajs):
        return
    cfg = config(mode, packing)
    plan = split(count, num_microbatches, num_ranks, seed)
    check_exact(accumulated(trajs, advantages, cfg, plan), full_batch(MODEL, trajs, advantages, cfg))


@pytest.mark.parametrize("packing", ["packed", "tree", "padded"])
@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode_and_layout_with_a_rank_of_dummies(packing: Packing, mode: str) -> None:
    trajs, advantages = make_step(11, seed=5)
    cfg = config(mode, packing)
    check_exact(accumulated(trajs, advantages, cfg, DUMMY_RANK), full_batch(MODEL, trajs, advantages, cfg))
    planned = plan_rows(trajs, packing, max_tokens=32, num_ranks=3)
    assert len({len(slots) for slots in planned.ranks}) == 1
    check_exact(
        accumulated(trajs, advantages, cfg, DealtPlan([list(map(list, slots)) for slots in planned.ranks])),
        full_batch(MODEL, trajs, advantages, cfg),
    )


def local_mean_gradient(trajs: list[Trajectory], advantages: Tensor, slots: list[list[int]]) -> Tensor:
    """The planted bug: each microbatch averages over its own tokens, then the means are averaged."""
    model = copy.deepcopy(MODEL)
    cfg = config("token_mean", "packed")
    for slot in slots:
        chosen = [trajs[i] for i in slot]
        weights = [w / len(slots) for w in token_weights(chosen)]
        plan = DealtPlan([[list(range(len(slot)))]])
        accumulate(model, chosen, advantages[slot], cfg, plan, weights=weights, reference=REFERENCE)
    return gradients(model)


def test_the_planted_local_mean_is_caught() -> None:
    trajs, advantages = make_step(24, seed=3)
    trajs = [t for t in trajs if t.num_actions]
    advantages = advantages[: len(trajs)]
    want = full_batch(MODEL, trajs, advantages, config("token_mean", "packed"))["grads"]
    by_length = sorted(range(len(trajs)), key=lambda i: trajs[i].num_actions)
    slots = [by_length[i : i + 4] for i in range(0, len(by_length), 4)]
    wrong = local_mean_gradient(trajs, advantages, slots)
    assert float((wrong - want).norm() / want.norm()) > 0.1
    cfg = config("token_mean", "packed")
    right, metrics = accumulated(trajs, advantages, cfg, DealtPlan([slots]))
    assert float((right - want).norm() / want.norm()) < 1e-10
    counts = [sum(trajs[i].num_actions for i in slot) for slot in slots]
    assert metrics.distortion.value == pytest.approx(sum(counts) / len(counts) / min(counts))


def test_ranks_that_hold_their_own_trajectories_need_one_sum_of_counts() -> None:
    trajs, advantages = make_step(12, seed=8)
    shares = [[i for i, t in enumerate(trajs) if (t.group == "0") == first] for first in (True, False)]
    for mode in MODES:
        cfg = config(mode, "packed")
        whole = sum((Denominators.of([trajs[i] for i in share]) for share in shares), start=Denominators())
        total, metrics = torch.zeros(()), UpdateMetrics()
        for share in shares:
            own, model = [trajs[i] for i in share], copy.deepcopy(MODEL)
            metrics += accumulate(
                model,
                own,
                advantages[share],
                cfg,
                DealtPlan([[list(range(len(own)))]]),
                num_ranks=2,
                weights=token_weights(own, mode, norm_const=7, denominators=whole),
                reference=REFERENCE,
            )
            total = total + gradients(model) / 2
        check_exact((total, metrics), full_batch(MODEL, trajs, advantages, cfg))


def test_a_loss_part_can_have_weights_of_its_own() -> None:
    trajs, advantages = make_step(9, seed=2)
    cfg = config("token_mean", "packed")
    parts = {
        "weights": token_weights(trajs, "token_mean"),
        "kl_weights": token_weights(trajs, "sequence_mean"),
        "entropy_weights": token_weights(trajs, "prompt_mean"),
    }
    zeros = [torch.zeros_like(w) for w in parts["weights"]]
    nothing = {name: zeros for name in parts}

    def gradient(plan: DealtPlan, weights: dict[str, list[Tensor]]) -> Tensor:
        model = copy.deepcopy(MODEL)
        accumulate(model, trajs, advantages, cfg, plan, reference=REFERENCE, **weights)
        return gradients(model)

    whole = DealtPlan([[list(range(9))]])
    apart = [gradient(whole, {**nothing, name: weights}) for name, weights in parts.items()]
    assert all(bool(part.any()) for part in apart)
    together = gradient(split(9, 3, 1, seed=0), parts)
    torch.testing.assert_close(together, sum(apart), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("packing", ["packed", "tree", "padded"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("own_loss", [True, False])
def test_the_bonus_is_minus_the_mean_entropy_of_plain_autograd(
    monkeypatch: pytest.MonkeyPatch, packing: Packing, fused: bool, own_loss: bool
) -> None:
    """Without advantages nothing else is left of the loss; a step against its gradient raises entropy."""
    monkeypatch.setattr("agentrl.train.rows.FUSED_HEAD_SIZE", 0 if fused else 1 << 30)
    trajs, _ = make_step(9, seed=7)
    cfg = RLConfig(packing=packing, entropy_coef=0.7, temperature=TEMPERATURE)

    def mean_entropy(model: TinyAgent) -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for t in trajs:
            logits = model(t.ids[None])[0, :-1] / TEMPERATURE
            entropy = torch.distributions.Categorical(logits=logits).entropy()
            total, count = total + entropy[t.action_mask == 1].sum(), count + t.num_actions
        return total / count

    plain, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    before = mean_entropy(plain)
    (-0.7 * before).backward()
    metrics = accumulate(
        model, trajs, torch.zeros(9), cfg, split(9, 3, 1, seed=1), token_loss=clipped if own_loss else None
    )
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-10, atol=1e-14)
    assert metrics.loss.total == pytest.approx(-0.7 * before.item(), rel=1e-12)
    assert metrics.entropy.value == pytest.approx(before.item(), rel=1e-12)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.01 * parameter.grad
    assert mean_entropy(model) > before


def clipped(scores: TokenScores, targets: TokenTargets) -> Tensor:
    """The default loss, given as a loss of one's own, which takes the general way."""
    return policy_loss(scores.logp, targets.old_logp, targets.advantages, 0.2, 0.2)


@pytest.mark.parametrize("packing", ["packed", "tree", "padded"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_the_fused_loss_gives_what_the_general_way_gives(
    monkeypatch: pytest.MonkeyPatch,
    packing: Packing,
    kl_coef: float,
    entropy_coef: float,
    temperature: float,
) -> None:
    calls: list[int] = []

    def counted(*args: Any, **keywords: Any) -> Any:
        calls.append(1)
        return fused_policy_loss(*args, **keywords)

    monkeypatch.setattr("agentrl.models.scoring.fused_policy_loss", counted)
    trajs, advantages = make_step(14, seed=6)
    advantages[::4] = 0.0  # tokens without gradient beside others
    cfg = replace(
        config("grpo", packing), kl_coef=kl_coef, entropy_coef=entropy_coef, temperature=temperature
    )
    plan = DealtPlan([[[0, 3, 5, 9], [1, 2, 6, 7], [4, 8], [10, 11, 12, 13]]])
    found: list[tuple[Tensor, UpdateMetrics]] = []
    for token_loss in (None, clipped):
        calls.clear()
        model = copy.deepcopy(MODEL)
        metrics = accumulate(model, trajs, advantages, cfg, plan, reference=REFERENCE, token_loss=token_loss)
        assert len(calls) == (4 if token_loss is None and packing != "padded" else 0)
        found.append((gradients(model), metrics))
    (fused, metrics), (general, others) = found
    assert float((fused - general).norm() / general.norm()) < 1e-10
    assert metrics.values() == pytest.approx(others.values(), rel=1e-12)
    assert metrics.loss.total == pytest.approx(others.loss.total, rel=1e-12)


@pytest.mark.parametrize(("more", "wanted"), [(0, 1), (1, 0)])
def test_a_head_is_fused_from_the_stated_size_on(
    monkeypatch: pytest.MonkeyPatch, more: int, wanted: int
) -> None:
    calls: list[int] = []

    def counted(*args: Any, **keywords: Any) -> Any:
        calls.append(1)
        return fused_policy_loss(*args, **keywords)

    monkeypatch.setattr("agentrl.models.scoring.fused_policy_loss", counted)
    monkeypatch.setattr("agentrl.train.rows.FUSED_HEAD_SIZE", MODEL.head().weight.numel() + more)
    trajs, advantages = make_step(5, seed=6)
    cfg = config("grpo", "packed")
    got = accumulated(trajs, advantages, cfg, DealtPlan([[list(range(5))]]))
    check_exact(got, full_batch(MODEL, trajs, advantages, cfg))
    assert len(calls) == wanted


def test_the_fused_loss_reports_the_same_figures_in_float32() -> None:
    trajs, advantages = make_step(14, seed=6)
    plan = DealtPlan([[list(range(14))]])
    values: list[dict[str, float]] = []
    for token_loss in (None, clipped):
        metrics = accumulate(
            copy.deepcopy(MODEL).float(), trajs, advantages, RLConfig(), plan, token_loss=token_loss
        )
        values.append({**metrics.values(), "loss": metrics.loss.total})
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_a_loss_that_is_a_mean_is_refused() -> None:
    trajs, advantages = make_step(6, seed=1)
    cfg = replace(config("token_mean", "packed"), entropy_coef=0.0, kl_coef=0.0)
    plan = split(6, 2, 1, seed=0)

    def plain(scores: TokenScores, targets: TokenTargets) -> Tensor:
        return -targets.advantages * scores.logp

    def mean(scores: TokenScores, targets: TokenTargets) -> Tensor:
        return plain(scores, targets).mean()

    def aggregated(scores: TokenScores, targets: TokenTargets) -> Tensor:
        per_token = plain(scores, targets)[None]
        return aggregate_loss(per_token, torch.ones_like(per_token))

    for loss, message in (
        (mean, "one number a token"),
        (aggregated, "mean over a part of an optimizer step"),
    ):
        with pytest.raises(ValueError, match=message):
            accumulate(copy.deepcopy(MODEL), trajs, advantages, cfg, plan, token_loss=loss)
    with step_in_parts(), pytest.raises(ValueError, match="mean over a part"):
        token_weights(trajs)
    model = copy.deepcopy(MODEL)
    accumulate(model, trajs, advantages, cfg, plan, token_loss=plain)  # REINFORCE
    twin = copy.deepcopy(MODEL)
    batch = collate(trajs, pad_id=0)
    logp = sequence_log_probs(twin, batch["ids"], cfg.temperature)
    aggregate_loss(-advantages[:, None] * logp, batch["action_mask"]).backward()
    torch.testing.assert_close(gradients(model), gradients(twin), rtol=1e-10, atol=1e-14)


def test_plans_that_do_not_hold_the_step_are_refused() -> None:
    trajs, advantages = make_step(6, seed=1)
    cfg = replace(config("token_mean", "packed"), kl_coef=0.0)
    whole = [0, 1, 2, 3, 4, 5]
    weights = token_weights(trajs)
    for ranks, message in (
        ([[[0, 1, 2, 3, 4]]], "stand in no microbatch"),
        ([[[*whole, 0]]], "more than once"),
        ([[[*whole, 6]]], "holds trajectory 6, but there are 6"),
        ([[[-1, *whole]]], "holds trajectory -1"),
        ([[[0, 1, 2]], [[3, 4, 5], []]], "between 1 and 2 microbatches"),
        ([], "one of the plan's 0"),
    ):
        with pytest.raises(ValueError, match=message):
            accumulate(copy.deepcopy(MODEL), trajs, advantages, cfg, DealtPlan(ranks))
        if "no microbatch" not in message:  # with weights of the whole step, a plan may hold a part of it
            with pytest.raises(ValueError, match=message):
                accumulate(copy.deepcopy(MODEL), trajs, advantages, cfg, DealtPlan(ranks), weights=weights)


def test_what_would_silently_change_the_gradient_is_refused() -> None:
    trajs, advantages = make_step(6, seed=1)
    cfg = config("token_mean", "packed")
    plain = replace(cfg, kl_coef=0.0)
    plan = DealtPlan([[[0, 1, 2, 3, 4, 5]]])
    weights = token_weights(trajs)
    short = [weight[:1] for weight in weights]
    unknown = [weight * torch.nan for weight in weights]
    for settings_, arguments, message in (
        (cfg, {}, "needs a ref_model"),
        (plain, {"rank": 1}, "rank must be one of the plan's 1"),
        (plain, {"rank": -1}, "rank must be one of the plan's 1"),
        (plain, {"num_ranks": 0}, "num_ranks must be a positive whole number"),
        (plain, {"num_ranks": -1}, "num_ranks must be a positive whole number"),
        (plain, {"weights": [*weights, weights[0]]}, "weights must hold a tensor a trajectory, 6; got 7"),
        (plain, {"entropy_weights": weights[:5]}, "entropy_weights must hold a tensor a trajectory"),
        (plain, {"kl_weights": short}, "kl_weights of trajectory 0 must have shape"),
        (plain, {"weights": unknown}, "weights must be finite at action tokens"),
        (plain, {"token_loss": lambda scores, targets: 0.0}, "one number a token, got float"),
    ):
        with pytest.raises(ValueError, match=message):
            accumulate(copy.deepcopy(MODEL), trajs, advantages, settings_, plan, **arguments)


def test_a_trajectory_beyond_the_budget_is_refused() -> None:
    trajs, _ = make_step(6, seed=1)
    longest = max(t.num_tokens for t in trajs)
    for packing in ("packed", "tree", "padded"):
        assert plan_rows(trajs, packing, longest).ranks
        with pytest.raises(ValueError, match="raise microbatch_tokens"):
            plan_rows(trajs, packing, longest - 1)


def test_a_dummy_touches_every_gradient_and_adds_nothing() -> None:
    trajs, advantages = make_step(3, seed=1)
    for packing in ("packed", "tree", "padded"):
        model = copy.deepcopy(MODEL)
        plan = DealtPlan([[[0, 1, 2]], [[]]])
        cfg = config("grpo", packing)
        metrics = accumulate(model, trajs, advantages, cfg, plan, rank=1, reference=REFERENCE)
        assert not gradients(model).any()
        assert metrics.entropy == Mean()


def test_layouts_agree_in_float32_at_the_first_step() -> None:
    trajs, advantages = make_step(14, seed=4)
    grads: dict[str, Tensor] = {}
    for packing in ("padded", "packed", "tree"):
        model = copy.deepcopy(MODEL).float()
        plan = plan_rows(trajs, packing, max_tokens=64)
        accumulate(model, trajs, advantages.float(), RLConfig(packing=packing), plan)
        grads[packing] = gradients(model)
    for packing in ("packed", "tree"):
        error = (grads[packing] - grads["padded"]).norm() / grads["padded"].norm()
        assert float(error) < 1e-6


CASES: list[tuple[str, Packing, bool]] = [
    *((mode, "packed", False) for mode in sorted(MODES)),
    ("grpo", "tree", True),
    ("token_mean", "padded", True),
]


def test_four_processes_give_the_full_batch(in_ranks: Any) -> None:
    """Sharded over four gloo processes, one of which has only dummies."""
    trajs, advantages = make_step(11, seed=5)
    shares = [[t for t in trajs if int(t.group) % 4 == rank] for rank in range(4)]  # the last is empty

    def on_rank(ranks: Ranks) -> list[Any]:
        assert Denominators.of(shares[ranks.rank]).all_reduced() == Denominators.of(trajs)
        results: list[Any] = []
        models: dict[bool, TinyAgent] = {}
        for mode, packing, recompute in CASES:
            if recompute not in models:
                models[recompute] = copy.deepcopy(MODEL)
                shard_policy(models[recompute], checkpoint_activations=recompute)
            model, cfg = models[recompute], config(mode, packing)
            model.zero_grad()
            own = accumulate(model, trajs, advantages, cfg, DUMMY_RANK, rank=ranks.rank, reference=REFERENCE)
            metrics = sum(ranks.gather(own), start=UpdateMetrics())
            grads = [cast(DTensor, p.grad).full_tensor().flatten() for p in model.parameters()]
            results.append((torch.cat(grads).tolist(), metrics))
        return results

    for results in in_ranks(4, on_rank):
        for (mode, packing, _), (grads, metrics) in zip(CASES, results, strict=True):
            want = full_batch(MODEL, trajs, advantages, config(mode, packing))
            check_exact((torch.tensor(grads, dtype=torch.float64), metrics), want)


def test_a_sharded_hugging_face_model_gives_the_full_batch(in_ranks: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from agentrl.models.hf import HFPolicy

    shape = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = HFPolicy(transformers.Qwen3ForCausalLM(shape).double())
    trajs, advantages = make_step(7, seed=5)
    plan = DealtPlan([[[0, 3], [1, 2, 6]], [[4, 5], []]])
    cfg = RLConfig(packing="packed", loss_mode="grpo", entropy_coef=0.1)
    alone = copy.deepcopy(policy)
    accumulate(alone, trajs, advantages, replace(cfg, packing="padded"), DealtPlan([[list(range(7))]]))
    want = torch.cat([cast(Tensor, p.grad).flatten() for p in alone.parameters()])

    def on_rank(ranks: Ranks) -> list[float]:
        shard_policy(policy)
        accumulate(policy, trajs, advantages, cfg, plan, rank=ranks.rank)
        grads = [cast(DTensor, p.grad).full_tensor().flatten() for p in policy.parameters()]
        return torch.cat(grads).tolist()

    for grads in in_ranks(2, on_rank):
        assert float((torch.tensor(grads, dtype=torch.float64) - want).norm() / want.norm()) < 1e-10
