"""Train language-model agents by reinforcement learning, fast and exactly.

The names below are the public API. They are resolved on first use, so that `import agentrl.plan`,
`.gym`, `.curriculum` and `.report` never load torch.
"""

from importlib import import_module
from typing import Any

# module -> public names, in the order in which the data flows
_PUBLIC: dict[str, tuple[str, ...]] = {
    "gym.tasks": ("make_tasks",),
    "gym.env": ("make_env",),
    "gym.tokenizer": ("build_tokenizer",),
    "curriculum.sampler": ("TaskSampler", "filter_by_pass_rate"),
    "data.trajectory": ("Trajectory",),
    "data.storage": ("load_trajectories", "save_trajectories"),
    "data.importers": ("import_trajectories",),
    "data.prefix_tree": ("prefix_forest", "split_tree"),
    "data.packing": ("pack_lengths", "pack_sequences", "unpack"),
    "data.sequence_cost": ("attention_cost",),
    "data.microbatch": ("plan_microbatches", "token_budget_batches"),
    "data.collate": ("collate", "pad_rows"),
    "data.advantages": ("compute_advantages",),
    "data.weights": ("Denominators", "microbatch_weight_distortion", "token_weights"),
    "ops.log_probs": (
        "selected_log_probs",
        "chunked_log_probs",
        "checkpointed_log_probs",
        "action_log_probs",
    ),
    "ops.losses": ("aggregate_loss", "kl_to_reference", "policy_loss", "reinforce_loss"),
    "ops.fused_loss": ("fused_policy_loss",),
    "models.tiny": ("TinyAgent",),
    "models.scoring": ("sequence_log_probs", "packed_logits", "packed_log_probs"),
    "rollout.episode": ("sample_groups", "sample_step"),
    "train.config": ("RLConfig", "RunConfig"),
    "train.budget": ("suggest_max_tokens",),
    "train.step": ("accumulate", "rl_update"),
    "train.evaluate": ("behavior_stats", "evaluate"),
    "train.loop": ("train_rl",),
    "train.curriculum": ("train_curriculum",),
    "train.base": ("make_rl_base",),
    "diagnose.verification": ("Verification",),
    "diagnose.verify": ("VerifyOptions", "verify"),
    "diagnose.analyze": ("AnalyzeOptions", "analyze"),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    value = getattr(import_module(f"agentrl.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
