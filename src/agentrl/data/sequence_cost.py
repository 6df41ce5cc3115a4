"""Cost: what computing one sequence takes, as a function of its length alone."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from agentrl.plan.configs import shape_from_config
from agentrl.plan.models import ModelShape

Cost = Callable[[int], float]


class ModelConfig(Protocol):
    """A configuration as transformers has it."""

    def to_dict(self) -> dict[str, Any]:
        """Its keys and values, as in a `config.json`."""
        ...


def attention_cost(shape: ModelShape | Mapping[str, Any] | ModelConfig, *, action_share: float = 1.0) -> Cost:
    """FLOPs of forward and backward of a causal sequence, as a function of its number of tokens.

    With P parameters that multiply each token, P_head of the output head, and `action_share` of the tokens
    being actions, a sequence of n tokens costs 6 n (P + action_share P_head) for the matrices, and per layer
    and direction 2 (key width + value width) a pair of tokens where one reads the other: n^2 / 2 pairs, or
    w n - w^2 / 2 in a layer that sees a window of w < n. `shape` is a ModelShape, a mapping like a
    `config.json`, or a transformers configuration; linear-attention layers cost the same for every token.

    Raises ValueError for an action_share outside [0, 1], a shape that is none of these, or a configuration
    with layers of unknown cost.

    >>> from agentrl.plan.configs import find_model
    >>> cost = attention_cost(find_model("Qwen3-8B"))  # attention costs as much as all matrices at 51,324
    >>> round(cost(2 * 51_324) / cost(51_324), 3)
    3.0
    """
    if not 0 <= action_share <= 1:
        raise ValueError(f"action_share must be between 0 and 1, got {action_share!r}")
    if isinstance(shape, ModelShape):
        known = shape
    elif isinstance(shape, Mapping):
        known = shape_from_config(shape)
    elif hasattr(shape, "to_dict"):
        known = shape_from_config(shape.to_dict())
    else:
        raise ValueError(
            "shape must be a ModelShape (of a known model: agentrl.plan.configs.find_model(name)), a mapping "
            f"like a config.json, or a transformers configuration (model.config); got {type(shape).__name__}"
        )
    matrices = 2.0 * (known.active_parameters - (1 - action_share) * known.head_parameters)

    def cost(num_tokens: int) -> float:
        return 3.0 * num_tokens * (matrices + known.causal_flops_per_token(num_tokens))

    return cost
