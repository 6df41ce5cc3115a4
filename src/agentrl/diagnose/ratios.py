"""Step-0 probability ratios: how far from 1 they are, where in the rows, and how far they may be."""

# N action tokens

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.diagnose.checks import Check, Statistic, make_check
from agentrl.diagnose.comparison import Gap

RATIO_OFF = 0.2  # a token is off where the probability ratio is further than this from 1
NUM_QUARTERS = 4
# A sampler of another precision: bfloat16 rounds a logit of size 10 to 0.03 nats, half of that on average.
SAMPLER_MEAN_GAP = 0.02  # nats
SAMPLER_SHARE_OFF = 0.01
# The chapter's figures for the small agent: tokens off by more than 20% with a leaky mask, and without.
CHAPTER_LEAKY, CHAPTER_EXACT = 0.058, 0.0


@dataclass(frozen=True, slots=True)
class RatioProfile:
    """How far probability ratios of N action tokens are from 1, and where in the rows."""

    num_tokens: int
    share_off: float  # tokens with |ratio - 1| > RATIO_OFF
    mean_gap: float  # nats, of |log ratio|
    max_gap: float  # nats
    off_by_quarter: tuple[float | None, ...]  # share_off, by quarter of the row; None: no action token there
    gap_by_quarter: tuple[float | None, ...]  # mean_gap, by quarter of the row

    @staticmethod
    def of(got: Tensor, want: Tensor, place: Tensor) -> "RatioProfile":
        """The ratios exp(got - want) of tokens [N] at `place` [N] in [0, 1) of their rows; NaN is left out.

        >>> logp = torch.tensor([-1.0, -1.0, -1.0])
        >>> found = RatioProfile.of(logp, torch.tensor([-1.0, -1.1, -1.5]), torch.tensor([0.1, 0.4, 0.9]))
        >>> round(found.share_off, 2), found.off_by_quarter
        (0.33, (0.0, 0.0, None, 1.0))
        """
        known = ~want.isnan()
        gap, place = (got - want)[known].double(), place[known]
        off = ((gap.exp() - 1).abs() <= RATIO_OFF).logical_not().double()
        quarter = (place * NUM_QUARTERS).long().clamp(max=NUM_QUARTERS - 1)
        mine = [quarter == i for i in range(NUM_QUARTERS)]
        return RatioProfile(
            num_tokens=len(gap),
            share_off=float(off.mean()) if len(gap) else 0.0,
            mean_gap=float(gap.abs().mean()) if len(gap) else 0.0,
            max_gap=float(gap.abs().max()) if len(gap) else 0.0,
            off_by_quarter=tuple(float(off[m].mean()) if bool(m.any()) else None for m in mine),
            gap_by_quarter=tuple(float(gap[m].abs().mean()) if bool(m.any()) else None for m in mine),
        )

    @property
    def grows(self) -> bool:
        """Whether the gap grows along the row, as a leak does, instead of lying flat, as rounding does."""
        known = [gap for gap in self.gap_by_quarter if gap is not None]
        return len(known) > 1 and known[-1] > 2 * known[0] and max(known) > 1e-3


@dataclass(frozen=True, slots=True)
class RatioLimits:
    """The most that ratios may be off."""

    mean_gap: float  # nats
    share_off: float

    @staticmethod
    def of_own_sampler(allowed: Gap, dtype: torch.dtype, logp: Tensor, recorded: bool) -> "RatioLimits":
        """Rounding, where this very model gave the log-probs; `recorded` ones went through float32."""
        slack = 1e-6 * max(1.0, float(logp.abs().max())) if recorded else 0.0
        return RatioLimits(allowed.mean + slack, SAMPLER_SHARE_OFF if dtype.itemsize == 2 else 0.0)

    @staticmethod
    def of_other_sampler() -> "RatioLimits":
        """What a sampler in bfloat16 costs."""
        return RatioLimits(SAMPLER_MEAN_GAP, SAMPLER_SHARE_OFF)


def ratio_check(profile: RatioProfile, limits: RatioLimits, *, recorded: bool, leaky: bool) -> Check:
    """The line on step-0 ratios; `recorded`: to the sampler's log-probs, else to each trajectory alone."""
    statistics = (
        Statistic("off by 20%", profile.share_off, limits.share_off, "share"),
        Statistic("mean gap", profile.mean_gap, limits.mean_gap, "nats"),
        Statistic("max gap", profile.max_gap, None, "nats"),
    )
    quarters = ", ".join("-" if x is None else f"{x:.1%}" for x in profile.off_by_quarter)
    where = "" if recorded else "No sampler log-probs: against each trajectory alone. "
    where += f"Off by quarter of the row: {quarters}. "
    failed = (
        "Grows along the row, as a leak does: look at masks and positions."
        if profile.grows
        else "Flat along the row, as a gap in precision, temperature or weights is, not a leak."
    )
    if leaky:
        failed += f" The chapter: {CHAPTER_LEAKY:.1%} with a leaky mask, {CHAPTER_EXACT:.1%} without."
    passed = "What was sampled is what is trained on."
    return make_check("step-0 ratio", statistics, where + passed, where + failed)
