"""Whether packing, splitting and the head are exact, on your model and your trajectories."""

# B trajectories, N action tokens, R rows, L row length

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import nn

from agentrl.data.packing import PackedBatch, pack_sequences
from agentrl.data.trajectory import Trajectory
from agentrl.diagnose.checks import (
    Check,
    Statistic,
    gradient_check,
    log_prob_check,
    log_prob_statistics,
    make_check,
)
from agentrl.diagnose.comparison import (
    HEAD_TOKENS,
    Gap,
    Objective,
    Scores,
    allowed_gap,
    gap,
    relative_error,
    rounding,
    score_alone,
    score_heads,
    score_packed,
    taken_gradients,
    undisturbed,
)
from agentrl.diagnose.generated import generate_trajectories, usable_trajectories
from agentrl.diagnose.isolation import isolation, with_leak, with_running_positions
from agentrl.diagnose.ratios import RatioLimits, RatioProfile, ratio_check
from agentrl.diagnose.stages import Report, Stages
from agentrl.diagnose.verification import Bug, Verification
from agentrl.models.policy import Policy
from agentrl.models.scoring import action_hidden, as_policy
from agentrl.models.tiny import TinyAgent
from agentrl.train.config import RLConfig
from agentrl.train.rows import plan_rows
from agentrl.train.step import accumulate

ONE_ROW = 16_384  # tokens of all trajectories that are packed into one row if no row length is given

# What is being computed, as `progress` is told.
ALONE = "each trajectory alone, full logits"
WIDER = "the same in the next wider dtype, for what rounding does"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What the comparisons are made with."""

    max_tokens: int | None = None  # tokens of a row; None: all trajectories in one row, up to 16,384
    temperature: float = 1.0  # that the trajectories were sampled at
    gradients: bool = True  # compare gradients too; needs memory for the weights four times more
    simulate: Bug | None = None  # a classic bug to show
    seed: int = 0  # of the advantages, and of generated trajectories

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.simulate is not None and self.simulate not in get_args(Bug):
            raise ValueError(f"simulate must be one of {', '.join(get_args(Bug))}, got {self.simulate!r}")
        if self.simulate == "local-mean" and not self.gradients:
            raise ValueError(
                "simulate='local-mean' changes gradients only; leave out --no-gradients (gradients=False)"
            )


def verify(
    policy: Policy | nn.Module,
    trajs: Sequence[Trajectory] | None = None,
    options: VerifyOptions | None = None,
    *,
    own_sampler: bool = False,
    progress: Report = lambda stage, done: None,
) -> Verification:
    """Every saving of this package against the plain computation, on this model and these trajectories.

    The plain computation runs each trajectory alone with full logits. Compared with it: packed rows, prefix
    trees, the tiled head, microbatches in another order, their gradients, whether sequences read each other,
    and the log-probs that the trajectories carry (`own_sampler`: this very model sampled them, in this
    dtype). Without trajectories, some are sampled from the model. Trajectories without action tokens are left
    out. Where they share less than 10% of their tokens, a branch of the shortest is added for the trees.

    **Allowed error.** Nothing is assumed about how a model amplifies rounding: it is measured. Let e be the
    error of the plain computation in the model's dtype against the same in the next wider one (float32 for
    16 bits, float64 for float32). A saving may be at most twice as far from the exact value, so by the
    triangle inequality at most 3 e from the plain one, plus 8 machine epsilons of the value. This holds for
    the largest and for the mean error of a log-prob, and for the relative error of the whole gradient; a
    leak that hides below the largest shows in the mean. A float64 model may differ by 1e-10 of the value,
    unless it rounds to float32 inside, as transformers' norms do: then e is the difference to float32. The
    isolation probe has no tolerance: not a bit may change (with experts, whose shapes depend on all tokens,
    16 epsilons). Log-probs of another sampler may differ by what bfloat16 costs: 0.02 nats on average, 1%
    of tokens by more than 20%.

    `progress` is told what is being computed, and what share of the work is done, 0 to 1.

    The model's weights, gradients and modes are afterwards what they were. Raises ValueError where no
    trajectory has action tokens, ids do not fit the vocabulary, no row holds two trajectories, or the model
    cannot read packed rows.

    >>> from agentrl.models.tiny import TinyAgent, TinyConfig
    >>> found = verify(TinyAgent(TinyConfig(vocab_size=11, num_layers=1)).double())
    >>> found.passed, found["packed against alone"].statistics[0].allowed < 1e-8
    (True, True)
    >>> verify(TinyAgent(TinyConfig(vocab_size=11)), options=VerifyOptions(simulate="local-mean")).failed
    ['gradient: microbatches against one batch']
    """
    options = options or VerifyOptions()
    policy = as_policy(policy)
    with undisturbed(policy.module):
        if trajs is None:
            progress("sampling trajectories", 0.0)
            own_sampler = True
            trajs = generate_trajectories(policy, temperature=options.temperature, seed=options.seed)
        chosen = usable_trajectories(policy, trajs)
        return _Verifier(policy, chosen, options, own_sampler, progress).run()


class _Verifier:
    """One verification under way."""

    def __init__(
        self,
        policy: Policy,
        trajs: list[Trajectory],
        options: VerifyOptions,
        own_sampler: bool,
        report: Report,
    ) -> None:
        self.policy, self.trajs, self.options = policy, trajs, options
        self.own_sampler, self.report = own_sampler, report
        self.head = policy.head()
        self.dtype, self.device = self.head.weight.dtype, self.head.weight.device
        self.gradients = options.gradients and any(p.requires_grad for p in policy.module.parameters())
        self.objective = Objective.of(trajs, options.temperature, options.seed)
        longest, total = max(t.num_tokens for t in trajs), sum(t.num_tokens for t in trajs)
        self.max_tokens = options.max_tokens or min(total, max(2 * longest, ONE_ROW))
        if options.simulate == "positions" and isinstance(policy, TinyAgent):
            # its positions end there; those of rotary embeddings do not
            self.max_tokens = min(self.max_tokens, policy.config.max_positions)

    def run(self) -> Verification:
        flat, tree = self._rows(share_prefixes=False), self._rows(share_prefixes=True)
        stages = Stages(self._costs(flat.num_tokens, tree.num_tokens), self.report)
        stages.begin(ALONE)
        plain = score_alone(self.policy, self.objective, self.gradients, stages.advance)
        stages.begin(WIDER)
        noise = rounding(self.policy, self.objective, plain, stages.advance)
        allowed = allowed_gap(noise, self.dtype, plain.logp)
        stages.begin("packed rows")
        packed = score_packed(self.policy, self.objective, flat, self.gradients)
        stages.begin("prefix trees")
        forked = score_packed(self.policy, self.objective, tree, self.gradients)
        gaps = (("packed", gap(packed, plain)), ("tree", gap(forked, plain)))
        checks = [log_prob_check("packed", gaps[0][1], allowed), log_prob_check("tree", gaps[1][1], allowed)]
        stages.begin("the head")
        head_check, head_gradient = self._heads(flat)
        checks.append(head_check)
        if self.gradients:
            checks += [gradient_check(f"{name} against alone", found, allowed) for name, found in gaps]
            checks.append(head_gradient)
            stages.begin("microbatches in another order")
            checks.append(self._microbatches(packed, allowed))
        stages.begin("isolation")
        checks += self._isolation("flat rows", flat)
        stages.advance(flat.num_tokens / (flat.num_tokens + tree.num_tokens))
        checks += self._isolation("trees", tree)
        profile, check = self._ratios(flat, packed, plain, allowed)
        return Verification(
            checks=(*checks, check),
            dtype=self.dtype,
            num_trajectories=len(self.trajs),
            num_tokens=flat.num_tokens,
            num_actions=len(plain.logp),
            tree_share=1 - tree.num_tokens / flat.num_tokens,
            profile=profile,
            simulated=self.options.simulate,
        )

    def _costs(self, flat: int, tree: int) -> dict[str, int]:
        """Positions that each stage computes, a backward as two and a position in a wider dtype as two."""
        passes = 3 if self.gradients else 1
        costs = {
            ALONE: passes * flat,
            WIDER: 2 * passes * flat,
            "packed rows": passes * flat,
            "prefix trees": passes * tree,
            "the head": flat,
            "isolation": 3 * (flat + tree),
        }
        if self.gradients:
            costs["microbatches in another order"] = passes * flat
        return costs

    def _rows(self, share_prefixes: bool) -> PackedBatch:
        packed = pack_sequences(self.trajs, self.max_tokens, share_prefixes=share_prefixes, pad_to=None)
        packed = packed.to(self.device)
        if self.options.simulate == "leak":
            return with_leak(packed)
        return with_running_positions(packed) if self.options.simulate == "positions" else packed

    @torch.no_grad()
    def _heads(self, flat: PackedBatch) -> tuple[Check, Check]:
        every = torch.linspace(0, len(flat.actions) - 1, min(HEAD_TOKENS, len(flat.actions))).long()
        hidden = action_hidden(self.policy, flat)[every.to(self.device)]
        targets = flat.actions.target[every.to(self.device)]
        options = self.options
        fast, full, exact = score_heads(self.policy, hidden, targets, options.temperature, options.seed)
        noise = None if exact is None else gap(full, exact)
        found, allowed = gap(fast, full), allowed_gap(noise, self.dtype, full.logp)
        return (
            make_check(
                "fast head against full logits",
                log_prob_statistics(found, allowed),
                "The tiled head gives the full logits' values, to rounding.",
                "The tiled head is wrong for this model's head: bias, scale, soft-cap or temperature.",
            ),
            gradient_check("fast head against full logits", found, allowed),
        )

    def _microbatches(self, packed: Scores, allowed: Gap) -> Check:
        """Gradients of small microbatches, the trajectories in reverse, against those of one batch."""
        order = range(len(self.trajs) - 1, -1, -1)
        # `accumulate` wants recorded log-probs; this loss does not read them
        trajs = [
            replace(t, sample_logp=torch.zeros_like(t.sample_logp))
            for t in map(self.trajs.__getitem__, order)
        ]
        lengths = [t.num_tokens for t in trajs]
        plan = plan_rows(trajs, "packed", max(max(lengths), -(-sum(lengths) // 3)))
        batches = plan.ranks[0]
        weights = None
        if self.options.simulate == "local-mean":
            weights = [t.action_mask.double() for t in trajs]
            for batch in batches:
                count = sum(trajs[i].num_actions for i in batch)
                for i in batch:
                    weights[i] /= count * len(batches)
        accumulate(
            self.policy,
            trajs,
            self.objective.advantages.flip(0),
            RLConfig(packing="packed", temperature=self.options.temperature),
            plan,
            weights=weights,
            token_loss=lambda scores, targets: -targets.advantages * scores.logp,
        )
        error = relative_error(taken_gradients(self.policy), packed.gradients)
        return make_check(
            "gradient: microbatches against one batch",
            (Statistic("gradient", error, allowed.gradient, "relative"),),
            f"{len(batches)} microbatches in reverse order give the gradient of one batch.",
            "The gradient depends on the split: a mean over each microbatch, or rows that leak.",
        )

    def _isolation(self, name: str, packed: PackedBatch) -> list[Check]:
        """The probe's line; none for trees in which no trajectory has a token of its own."""
        experts = any("expert" in type(m).__name__.lower() for m in self.policy.module.modules())
        change, num_watched = isolation(self.policy, packed)
        allowed = 16 * torch.finfo(self.dtype).eps if experts else 0.0
        passed = f"Other tokens in a sequence change no bit at {num_watched:,} positions of its neighbours."
        if num_watched == 0:
            if any(len(row) > 1 for row in packed.rows):
                return []
            raise ValueError(
                f"no row of {self.max_tokens} tokens holds two sequences, so packing would not be tested; "
                "raise max_tokens, or cut the trajectories"
            )
        check = make_check(
            f"isolation in {name}",
            (Statistic("change", change, allowed, "relative"),),
            passed,
            "Sequences read each other: training would be on leaked context.",
        )
        return [check]

    def _ratios(
        self, flat: PackedBatch, packed: Scores, plain: Scores, allowed: Gap
    ) -> tuple[RatioProfile, Check]:
        """Step-0 ratios of the packed log-probs to the sampler's, or to each trajectory alone."""
        sampler = flat.actions.sample_logp.double().cpu()
        recorded = not bool(sampler.isnan().all())
        length = flat.ids.shape[1]
        place = (flat.actions.source % length).cpu() / length
        profile = RatioProfile.of(packed.logp, sampler if recorded else plain.logp, place)
        limits = (
            RatioLimits.of_own_sampler(allowed, self.dtype, plain.logp, recorded)
            if self.own_sampler or not recorded
            else RatioLimits.of_other_sampler()
        )
        leaky = self.options.simulate == "leak"
        return profile, ratio_check(profile, limits, recorded=recorded, leaky=leaky)
