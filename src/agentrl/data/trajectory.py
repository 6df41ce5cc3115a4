"""A trajectory: what one sequence of model calls saw, token in, token out. Text is never re-tokenised."""

# n tokens of one trajectory

import math
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One trajectory. Entry t of the [n-1] vectors describes ids[t+1], the token predicted at position t.

    Raises ValueError where a shape, a dtype or a value does not fit; the message names the field.

    >>> t = Trajectory(ids=torch.tensor([5, 7, 9]), action_mask=torch.tensor([0.0, 1.0]),
    ...                sample_logp=torch.tensor([0.0, -0.5]), reward=1.0, info={"task": "abs"})
    >>> t.group, t.num_tokens, t.num_actions
    ('abs', 3, 1)
    """

    ids: Tensor  # [n] int64: prompt, action and observation tokens in the order the model saw them
    action_mask: Tensor  # [n-1] float32: 1 where ids[t+1] was sampled by the policy, else 0
    sample_logp: Tensor  # [n-1] float32, nats; 0 where action_mask is 0; NaN throughout if unknown
    reward: float
    info: dict[str, Any] = field(default_factory=dict)  # 'task': the task's name; anything else is free
    group: str = ""  # trajectories of one group are compared with each other; default the task
    episode: str = ""  # trajectories of one episode count once; default unique

    def __post_init__(self) -> None:
        n = self.ids.numel()
        if self.ids.ndim != 1 or n == 0 or self.ids.dtype != torch.int64:
            raise ValueError(
                f"ids must be a non-empty int64 vector, got {self.ids.dtype} of shape {tuple(self.ids.shape)}"
            )
        if int(self.ids.min()) < 0:
            raise ValueError(f"ids must not be negative, got {int(self.ids.min())}")
        for name in ("action_mask", "sample_logp"):
            value: Tensor = getattr(self, name)
            if value.shape != (n - 1,) or value.dtype != torch.float32:
                raise ValueError(
                    f"{name} must be float32 of shape ({n - 1},), one entry fewer than ids has; "
                    f"got {value.dtype} of shape {tuple(value.shape)}"
                )
        is_action = self.action_mask == 1
        if not bool((is_action | (self.action_mask == 0)).all()):
            raise ValueError("action_mask must hold only 0 and 1")
        unknown = self.sample_logp.isnan()
        if bool(unknown.any()):
            if not bool(unknown.all()):
                raise ValueError("sample_logp must be NaN throughout (not recorded) or nowhere")
        elif bool((self.sample_logp[~is_action] != 0).any()):
            raise ValueError("sample_logp must be 0 where action_mask is 0")
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite, got {self.reward}")
        object.__setattr__(self, "group", self.group or str(self.info.get("task", "")))
        object.__setattr__(self, "episode", self.episode or uuid.uuid4().hex)

    @property
    def num_tokens(self) -> int:
        """Number of tokens n, actions included."""
        return self.ids.numel()

    @property
    def num_actions(self) -> int:
        """Number of action tokens: those that the policy sampled."""
        return int(self.action_mask.sum())

    @property
    def num_runs(self) -> int:
        """Number of maximal runs of action tokens: the turns that the policy took."""
        starts = self.action_mask.diff(prepend=self.action_mask.new_zeros(1)) > 0
        return int(starts.sum())
