"""Weights: the one owner of denominators. After this a loss is only ever (weights * per_token).sum()."""

# B trajectories, T padded width, n tokens of one trajectory, M microbatches

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.data.advantages import rewards_differ
from agentrl.data.collate import label_numbers
from agentrl.data.lengths import Lengths, as_lengths, one_of
from agentrl.data.trajectory import Trajectory

ZeroAdvantage = Literal["include", "exclude"]

# mode -> the names that other trainers use for it
MODES: dict[str, tuple[str, ...]] = {
    "token_mean": ("token-mean", "dapo"),
    "token_sum": ("token-sum",),
    "sequence_mean": ("seq-mean-token-mean", "grpo"),
    "sequence_sum": ("seq-mean-token-sum",),
    "sequence_sum_norm": ("seq-mean-token-sum-norm", "dr_grpo"),
    "constant": (),
    "prompt_mean": ("prompt-mean",),
}
_MODE_OF = {name: mode for mode, aliases in MODES.items() for name in (mode, *aliases)}
_NEEDS_NORM = ("constant", "sequence_sum_norm")
_NO_DENOMINATOR = ("constant", "token_sum")
_PER_TOKEN_MEAN = ("sequence_mean", "prompt_mean")  # a mean over a unit's tokens, then over the units

# True while an optimizer step is being computed in parts, where a denominator of one's own would be wrong.
_in_parts: ContextVar[bool] = ContextVar("in_parts", default=False)


@contextmanager
def step_in_parts() -> Iterator[None]:
    """While the block runs, modes that have a denominator refuse to take it from what they are given."""
    token = _in_parts.set(True)
    try:
        yield
    finally:
        _in_parts.reset(token)


def resolve_mode(mode: str) -> str:
    """The mode that a name or an alias of another trainer stands for; ValueError for an unknown one.

    >>> resolve_mode("dr_grpo")
    'sequence_sum_norm'
    """
    if mode not in _MODE_OF:
        raise ValueError(f"unknown loss mode {mode!r}; modes and aliases are {', '.join(_MODE_OF)}")
    return _MODE_OF[mode]


def check_mode(mode: str, norm_const: float | None) -> str:
    """The resolved mode; ValueError where it divides by norm_const and that is not positive."""
    resolved = resolve_mode(mode)
    if resolved in _NEEDS_NORM and (norm_const is None or not 0 < norm_const < float("inf")):
        raise ValueError(f"loss mode {mode!r} divides by norm_const; give a positive one, got {norm_const}")
    return resolved


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the weights of one optimizer step divide by, counted over all its trajectories on all ranks.

    Counts add: those of two ranks are the sum of each one's, if every episode and group is whole on one rank.

    >>> Denominators(num_tokens=3, num_episodes=1, num_groups=1) + Denominators(4, 2, 1)
    Denominators(num_tokens=7, num_episodes=3, num_groups=2)
    """

    num_tokens: int = 0  # action tokens
    num_episodes: int = 0  # episodes that have an action token
    num_groups: int = 0  # groups that have an action token

    @classmethod
    def of(cls, trajs: Sequence[Trajectory], zero_advantage: ZeroAdvantage = "include") -> "Denominators":
        """Those of these trajectories; see `token_weights` for zero_advantage."""
        return cls.count(
            _counts(trajs, zero_advantage),
            label_numbers([t.episode for t in trajs]),
            label_numbers([t.group for t in trajs]),
        )

    @classmethod
    def count(cls, num_actions: Tensor, episodes: Tensor, groups: Tensor) -> "Denominators":
        """Those of trajectories with num_actions [B] action tokens and labels episodes, groups [B]."""
        has_any = num_actions > 0
        return cls(
            num_tokens=int(num_actions.sum()),
            num_episodes=torch.unique(episodes[has_any]).numel(),
            num_groups=torch.unique(groups[has_any]).numel(),
        )

    def __add__(self, other: "Denominators") -> "Denominators":
        return Denominators(
            self.num_tokens + other.num_tokens,
            self.num_episodes + other.num_episodes,
            self.num_groups + other.num_groups,
        )

    def all_reduced(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> "Denominators":
        """The sum over the ranks of a process group: the one communication that exact weights need."""
        counts = torch.tensor([self.num_tokens, self.num_episodes, self.num_groups], device=device)
        dist.all_reduce(counts, group=group)
        return Denominators(*counts.tolist())


def _counts(trajs: Sequence[Trajectory], zero_advantage: ZeroAdvantage) -> Tensor:
    """Action tokens [B] int64 that count: none in a group without signal under 'exclude'."""
    one_of("zero_advantage", zero_advantage, get_args(ZeroAdvantage))
    counts = torch.tensor([t.num_actions for t in trajs], dtype=torch.int64)
    if zero_advantage == "include":
        return counts
    rewards: dict[str, set[float]] = {}
    for i, t in enumerate(trajs):
        if not t.group:
            raise ValueError(
                f"trajectory {i} names no group; zero_advantage='exclude' leaves out whole groups"
            )
        rewards.setdefault(t.group, set()).add(t.reward)
    signal = {group: rewards_differ(each) for group, each in rewards.items()}
    return counts * torch.tensor([signal[t.group] for t in trajs], dtype=torch.bool)


def token_weights(
    trajs: Iterable[Trajectory],
    mode: str = "token_mean",
    *,
    norm_const: float | None = None,
    zero_advantage: ZeroAdvantage = "include",
    denominators: Denominators | None = None,
) -> list[Tensor]:
    """The weight of every action token of an optimizer step: one float64 [n - 1] a trajectory, 0 elsewhere.

    A loss is then only ever the sum of weight times per-token loss, however the step is split. The modes are
    those of `trajectory_weights`. Trajectories of one episode count as one sequence; one without action
    tokens counts nothing. zero_advantage='exclude' gives the groups whose rewards are all equal weight 0 and
    no part in any denominator; used for every part of the loss, it leaves them out of a KL term alike.

    `trajs` must be all trajectories of the step. Where a rank holds a part (whole groups), pass
    `denominators=Denominators.of(trajs, zero_advantage).all_reduced()`.

    A loss part of its own (an auxiliary loss, an entropy bonus on some tokens) gets its own weights in the
    same way, from trajectories whose action_mask marks the tokens that it counts.

    Raises ValueError as `trajectory_weights` does, and for a group that is missing where one is needed.

    >>> def trajectory(n):
    ...     return Trajectory(torch.arange(n + 1), torch.ones(n), torch.zeros(n), reward=0.0)
    >>> token_weights([trajectory(1), trajectory(2)], "sequence_mean")
    [tensor([0.5000], dtype=torch.float64), tensor([0.2500, 0.2500], dtype=torch.float64)]
    """
    trajs = list(trajs)
    counts = _counts(trajs, zero_advantage)
    groups = None
    if check_mode(mode, norm_const) == "prompt_mean":
        unnamed = [i for i, t in enumerate(trajs) if not t.group]
        if unnamed:
            raise ValueError(f"prompt_mean averages over groups; trajectories {unnamed[:5]} name none")
        groups = label_numbers([t.group for t in trajs])
    each = trajectory_weights(
        counts,
        mode,
        norm_const,
        episodes=label_numbers([t.episode for t in trajs]),
        groups=groups,
        denominators=denominators,
    )
    each = each.where(counts > 0, 0.0)
    return [weight * t.action_mask.double() for weight, t in zip(each, trajs, strict=True)]


def microbatch_weight_distortion(num_actions: Lengths) -> list[float]:
    """By what factor a mean taken in each of M microbatches would change the weight of its tokens.

    With N_m action tokens (`num_actions` [M]) of N in microbatch m, averaging the microbatches' means gives a
    token 1/(M N_m) instead of 1/N: the factor N / (M N_m). It is 1 everywhere only for equal microbatches.
    The same holds for ranks. A microbatch without action tokens has no mean and is not allowed.

    >>> [round(factor, 2) for factor in microbatch_weight_distortion([96, 112, 180, 355])]
    [1.93, 1.66, 1.03, 0.52]
    """
    counts = as_lengths(num_actions, "count")
    return [float(counts.sum() / (counts.size * count)) for count in counts]


def _total_by(labels: Tensor, values: Tensor) -> Tensor:
    """For each trajectory, the sum [B] of values [B] over those with its label."""
    index = torch.unique(labels, return_inverse=True)[1]
    return values.new_zeros(values.numel()).scatter_add(0, index, values)[index]


def trajectory_weights(
    num_actions: Tensor,
    mode: str = "token_mean",
    norm_const: float | None = None,
    *,
    episodes: Tensor | None = None,
    groups: Tensor | None = None,
    denominators: Denominators | None = None,
) -> Tensor:
    """The weight, float64 [B], of each action token of the B trajectories of one optimizer step.

    num_actions [B] counts their action tokens; episodes, groups [B] int64 label what belongs together
    (default: each trajectory is its own episode). With N = num_actions.sum(), n_e the action tokens of an
    episode, n_g those of a group, and E and G the episodes and groups that have any:

        token_mean 1/N | token_sum 1 | sequence_mean 1/(n_e E) | sequence_sum 1/E
        sequence_sum_norm 1/(E norm_const) | constant 1/norm_const | prompt_mean 1/(n_g G)

    Modes without norm_const ignore it. A trajectory without action tokens counts nothing. The denominators
    belong to the optimizer step, not to the part of it that a rank or a microbatch holds: where the
    trajectories are a part, `denominators` are those of the whole.

    Raises ValueError for an unknown mode, a norm_const that does not fit it, prompt_mean without groups, and
    where a mode needs a denominator, `denominators` are not given, and a step is being computed in parts.

    >>> trajectory_weights(torch.tensor([2, 10]), "sequence_mean")
    tensor([0.2500, 0.0500], dtype=torch.float64)
    """
    mode = check_mode(mode, norm_const)
    if mode == "prompt_mean" and groups is None:
        raise ValueError(
            "prompt_mean averages over prompts and needs the group of each trajectory; pass groups="
        )
    if denominators is None and mode not in _NO_DENOMINATOR and _in_parts.get():
        raise ValueError(
            f"{mode} asks for the mean over a part of an optimizer step, which is not a part of its mean; "
            "return the loss of every token, its weight is fixed already"
        )
    counts = num_actions.double()
    own = torch.arange(counts.numel(), device=counts.device)
    episodes = own if episodes is None else episodes
    labels = groups if mode == "prompt_mean" and groups is not None else episodes
    if labels.shape != counts.shape:
        raise ValueError(f"labels must have shape {tuple(counts.shape)}, got {tuple(labels.shape)}")
    whole = denominators or Denominators.count(num_actions, episodes, episodes if groups is None else groups)
    per_unit = _total_by(labels, counts).clamp(min=1) if mode in _PER_TOKEN_MEAN else torch.ones_like(counts)
    divisor = {
        "token_mean": whole.num_tokens,
        "token_sum": 1,
        "constant": norm_const or 1,
        "prompt_mean": whole.num_groups,
        "sequence_mean": whole.num_episodes,
        "sequence_sum": whole.num_episodes,
        "sequence_sum_norm": whole.num_episodes * (norm_const or 1),
    }[mode]
    return 1.0 / (per_unit * (divisor or 1))


def padded_weights(
    mask: Tensor,
    mode: str = "token_mean",
    norm_const: float | None = None,
    *,
    episodes: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """The weight, float64 [B, T-1], of every entry of a padded batch; 0 where mask [B, T-1] is 0.

    Raises ValueError for a mask of other values than 0 and 1, and as trajectory_weights does.

    >>> padded_weights(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), "sequence_mean")
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]], dtype=torch.float64)
    """
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask must hold only 0 and 1: a token counts or does not")
    mask = mask.double()  # bfloat16 counts to 256 only
    weights = trajectory_weights(mask.sum(-1), mode, norm_const, episodes=episodes, groups=groups)
    return weights[:, None] * mask
