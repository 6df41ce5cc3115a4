"""The shape of a policy's model: what its sequences cost, where its configuration says it."""

from agentrl.models.policy import Policy
from agentrl.models.tiny import TinyConfig
from agentrl.plan.configs import shape_from_config
from agentrl.plan.models import ModelShape


def shape_of(policy: Policy) -> ModelShape | None:
    """The shape in the configuration of a TinyAgent or a transformers model.

    None for a policy without such a configuration, and for layers that `shape_from_config` does not know.

    >>> from agentrl.models.tiny import TinyAgent
    >>> shape_of(TinyAgent(TinyConfig(vocab_size=11, num_layers=2))).num_layers
    2
    """
    config = getattr(policy.module, "config", None)
    if isinstance(config, TinyConfig):
        return ModelShape(
            name="TinyAgent",
            width=config.width,
            vocab_size=config.vocab_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.width // config.num_heads,
            num_full_layers=config.num_layers,
            ffn_width=-(-8 * config.width // 3),  # two matrices to 4 D, as the three that a shape counts
            tied_head=True,
        )
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        return None
    try:
        return shape_from_config(to_dict())
    except ValueError:
        return None
