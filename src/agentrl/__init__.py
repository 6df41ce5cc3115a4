"""Train language-model agents by reinforcement learning, fast and exactly.

The names below are the public API. They are resolved on first use, so that `import agentrl.plan`,
`.gym`, `.curriculum` and `.report` never load torch.
"""

from importlib import import_module
from typing import Any

# module -> public names, in the order in which the data flows
_PUBLIC: dict[str, tuple[str, ...]] = {
    "curriculum.sampler": ("TaskSampler", "filter_by_pass_rate"),
    "data.trajectory": ("Trajectory",),
    "ops.log_probs": ("selected_log_probs",),
    "models.scoring": ("sequence_log_probs",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    value = getattr(import_module(f"agentrl.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
