"""A Hugging Face causal LM, from a folder, a name on the hub or a GGUF file, as a policy; its tokenizer."""

from pathlib import Path
from typing import Any

import torch

from agentrl.data.chat import ChatTokenizer, HubTokenizer, load_tokenizer
from agentrl.models.policy import Policy


def load_hf_policy(model: str, dtype: torch.dtype | None = None) -> Policy:
    """The model in evaluation mode, in `dtype`, by default the one that it was saved in.

    A GGUF file is dequantized to float32 unless another dtype is given. Raises ValueError, in one line,
    where a package is missing, the model cannot be loaded, or its family cannot read packed rows.
    """
    where, keywords = _location(model)
    keywords["dtype"] = dtype or (torch.float32 if keywords else "auto")
    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError:
        raise ValueError(f"model {model!r} needs transformers: pip install 'agentrl[hf]'") from None
    from agentrl.models.hf import HFPolicy

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(where, **keywords)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(f"model {model!r} cannot be loaded: {_first_line(error)}") from None
    return HFPolicy(loaded.eval())


def load_hf_tokenizer(model: str) -> ChatTokenizer:
    """The tokenizer that stands beside a model or in its GGUF file. Raises ValueError where there is none."""
    where, keywords = _location(model)
    if not keywords:
        return load_tokenizer(model)
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise ValueError(f"tokenizer {model!r} needs transformers: pip install 'agentrl[hf]'") from None
    try:
        return HubTokenizer(AutoTokenizer.from_pretrained(where, **keywords), Path(model).name)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(f"{model!r} holds no tokenizer: {_first_line(error)}; name one") from None


def _location(model: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds a model, and the keywords that a GGUF file needs."""
    path = Path(model)
    if path.suffix != ".gguf":
        return model, {}
    if not path.is_file():
        raise ValueError(f"no such file: {model}")
    for package in ("gguf", "accelerate"):
        try:
            __import__(package)
        except ModuleNotFoundError:
            raise ValueError(
                f"reading a GGUF file needs the package {package}: pip install 'agentrl[gguf]'"
            ) from None
    return str(path.parent), {"gguf_file": path.name}


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
