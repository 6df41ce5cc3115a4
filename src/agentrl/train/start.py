"""What a run starts from: the policy and its tokenizer, embedded or from Hugging Face."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import build_tokenizer
from agentrl.models.policy import Policy
from agentrl.rollout.episode import TextTokenizer
from agentrl.train import base
from agentrl.train.config import RunConfig


def resolve_model(name: str | None) -> str | None:
    """A model's name as a run keeps it: a folder by its absolute path, a name on the hub as it is.

    Raises ValueError where the name is empty, the extra `hf` is missing, or what looks like a folder is none.
    """
    if name is None:
        return None
    if not name:  # not the current folder, as a path would have it
        raise ValueError("--model is empty; give a folder or OWNER/NAME, or leave it out for the TinyAgent")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"--model {name} needs transformers: pip install 'agentrl[hf]'")
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2:
        raise ValueError(f"--model {name}: there is no such folder, and names on the hub are OWNER/NAME")
    return name


def load_tokenizer(config: RunConfig) -> TextTokenizer:
    """The tokenizer of a run's model, with its instructions and chat template; embedded for the TinyAgent.

    Raises ValueError where it cannot be loaded, has no end-of-sequence token, or its chat template
    frames no turns.
    """
    model = config.model
    if model is None:
        return build_tokenizer(make_tasks("all"))
    from transformers import AutoTokenizer

    from agentrl.models.hf_tokenizer import HFTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} holds no tokenizer that loads: {_first_line(error)}") from error
    return HFTokenizer(tokenizer, instructions=config.instructions or "", chat_template=config.chat_template)


def load_start(
    model: str | None, tok: TextTokenizer, *, on_step: Callable[[int, int], None] | None = None
) -> Policy:
    """The policy that a run starts from, with float32 weights; None is the supervised TinyAgent.

    `on_step(step, num_steps)` hears of progress where that one has to be trained first.
    Raises ValueError where the model cannot be loaded or trained, or has fewer ids than its tokenizer.
    """
    if model is None:
        return base.make_rl_base(build_tokenizer(make_tasks("all")), on_step=on_step)
    from transformers import AutoModelForCausalLM

    from agentrl.models.hf import HFPolicy

    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model} holds no causal language model that loads: {_first_line(error)}"
        ) from error
    policy = HFPolicy(loaded)
    num_ids = policy.head().weight.shape[0]
    if num_ids < len(tok):
        raise ValueError(
            f"the tokenizer of {model} has {len(tok)} ids but the model only {num_ids}; resize its embeddings"
        )
    return policy


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
