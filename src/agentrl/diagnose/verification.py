"""What a verification found: its lines, and what they were measured on."""

from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.diagnose.checks import Check
from agentrl.diagnose.ratios import RatioProfile

Bug = Literal["leak", "positions", "local-mean"]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, on what."""

    checks: tuple[Check, ...]
    dtype: torch.dtype
    num_trajectories: int
    num_tokens: int
    num_actions: int
    tree_share: float  # positions that the prefix trees saved
    profile: RatioProfile  # step-0 ratios
    simulated: Bug | None

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> list[str]:
        """The names of the checks that did not pass."""
        return [check.name for check in self.checks if not check.passed]

    def __getitem__(self, name: str) -> Check:
        """The check of that name. Raises KeyError, listing the names, for one that is not there."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check {name!r}; checks are {', '.join(check.name for check in self.checks)}")
