"""Whether a Hugging Face model keeps packed sequences apart: by its family, and by trying it."""

# R rows, L row length, V vocabulary, D width

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.models.policy import Head, head_logits

# config.model_type -> what in its layers carries state along the row, across the bounds of sequences
STATEFUL_FAMILIES = {
    "bailing_hybrid": "linear attention",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2",
    "falcon_mamba": "Mamba",
    "granitemoehybrid": "Mamba-2",
    "jamba": "Mamba",
    "kimi_linear": "linear attention (KDA)",
    "lfm2": "short convolutions",
    "lfm2_moe": "short convolutions",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "minimax": "lightning attention",
    "nemotron_h": "Mamba-2",
    "olmo_hybrid": "linear attention (gated delta rule)",
    "qwen3_5": "linear attention (gated delta rule)",
    "qwen3_5_moe": "linear attention (gated delta rule)",
    "qwen3_5_moe_text": "linear attention (gated delta rule)",
    "qwen3_5_text": "linear attention (gated delta rule)",
    "qwen3_next": "linear attention (gated delta rule)",
    "recurrent_gemma": "a gated linear recurrence",
    "rwkv": "a linear recurrence",
    "xlstm": "an LSTM",
    "zamba": "Mamba",
    "zamba2": "Mamba-2",
}
KNOWN_LAYERS = ("full_attention", "sliding_attention")

Hidden = Callable[..., Tensor]  # (ids, position_ids, visible_until, embeds=None) -> hidden [R, L, D]

_SHOWN: "WeakSet[nn.Module]" = WeakSet()  # models that passed the probe


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model whose configuration rules packed rows out."""
    config = model.config.get_text_config()
    family = config.model_type
    reason = STATEFUL_FAMILIES.get(family)
    layers = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if reason is None and any("linear" in kind or kind in ("conv", "mamba", "recurrent") for kind in layers):
        reason = ", ".join(sorted(layers - set(KNOWN_LAYERS)))
    if reason is not None:
        raise ValueError(
            f"{family} cannot read packed rows: its layers carry state along the row ({reason}), so one "
            "sequence would leak into the next; train it on padded rows, one sequence each"
        )
    if unknown := sorted(layers - set(KNOWN_LAYERS)):
        raise ValueError(
            f"{family} has layers of kind {', '.join(unknown)}; packed attention computes only "
            f"{' and '.join(KNOWN_LAYERS)}"
        )
    if any("dynamic" in kind for kind, _ in _ropes(config)):
        raise ValueError(
            f"{family} uses dynamic RoPE scaling, whose frequencies follow the longest sequence of a batch: "
            "a sequence's log-probs would depend on its neighbours; set another rope_type in the config"
        )


def check_rope_length(model: PreTrainedModel, position_ids: Tensor) -> None:
    """Raise ValueError where LongRoPE would switch its factors for a whole batch because of one sequence."""
    for kind, limit in _ropes(model.config.get_text_config()):
        if kind == "longrope" and int(position_ids.max()) >= limit:
            raise ValueError(
                f"position {int(position_ids.max())} is beyond LongRoPE's original {limit} positions, where "
                "the model switches the frequencies of every sequence in the batch, short ones too; keep "
                "sequences below it or train such a batch unpacked"
            )


def _ropes(config: Any) -> list[tuple[str, int]]:
    """RoPE kind and original number of positions, one a kind of layer."""
    ropes: Any = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, dict)] or [ropes]
    default = getattr(config, "original_max_position_embeddings", None) or getattr(
        config, "max_position_embeddings", 0
    )
    return [
        (str(rope.get("rope_type", "default")), int(rope.get("original_max_position_embeddings") or default))
        for rope in nested
    ]


@contextlib.contextmanager
def float64_experts(model: PreTrainedModel) -> Iterator[None]:
    """Experts computed one by one while the model's weights are float64: torch groups only narrower ones."""
    if model.dtype != torch.float64 or model.config.get_text_config()._experts_implementation != "grouped_mm":
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def probe(model: PreTrainedModel, hidden: Hidden, head: Head) -> None:
    """Show once that packed rows are isolated and agree with the model's own forward, or raise ValueError.

    Two rows are tried, two sequences end to end and a shared prefix with two branches: each sequence alone
    must give the same logits to rounding; other tokens in its neighbour must change no bit of its hidden
    states.
    """
    if model.training:  # asked every time: a model is often shown in evaluation and trained later
        _refuse_dropout(model)
    if model in _SHOWN:
        return
    with _evaluating(model), float64_experts(model):
        rows = _Rows.on(model)
        _check_agreement(model, hidden, head, rows)
        _check_isolation(model, hidden, rows)
    _SHOWN.add(model)


def _refuse_dropout(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"{name} drops activations at random (rate {module.p}) while training, so the model's "
                "log-probs are not the sampler's; set its dropout to 0 in the config, or call model.eval()"
            )
    if noise := getattr(model.config.get_text_config(), "router_jitter_noise", 0.0):
        raise ValueError(
            f"router_jitter_noise={noise} routes at random while training; set it to 0 in the config"
        )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True, slots=True)
class _Rows:
    """Row 0: sequences A and B end to end. Row 1: a prefix P with branches X and Y."""

    ids: Tensor
    position_ids: Tensor
    visible_until: Tensor
    vocab_size: int

    # (row, positions of a whole sequence)
    SEQUENCES = ((0, slice(0, 11)), (0, slice(11, 20)), (1, slice(0, 14)), (1, [*range(8), *range(14, 20)]))
    # (row, what changes, what must not)
    SEPARATE = (
        (0, slice(0, 11), slice(11, 20)),
        (0, slice(11, 20), slice(0, 11)),
        (0, slice(10, 11), slice(0, 10)),
        (1, slice(8, 14), [*range(8), *range(14, 20)]),
        (1, slice(14, 20), slice(0, 14)),
    )

    @staticmethod
    def on(model: PreTrainedModel) -> "_Rows":
        vocab_size = int(model.config.get_text_config().vocab_size)
        positions = [[*range(11), *range(9)], [*range(14), *range(8, 14)]]
        until = [[11] * 11 + [20] * 9, [20] * 8 + [14] * 6 + [20] * 6]
        device = model.device
        ids = (torch.arange(40, device=device) * 7 + 3) % vocab_size
        return _Rows(
            ids.view(2, 20),
            torch.tensor(positions, device=device),
            torch.tensor(until, device=device),
            vocab_size,
        )


@torch.no_grad()
def _check_agreement(model: PreTrainedModel, hidden: Hidden, head: Head, rows: _Rows) -> None:
    """Packed logits against the model's own forward on each sequence alone."""
    states = hidden(rows.ids, rows.position_ids, rows.visible_until)
    for row, places in _Rows.SEQUENCES:
        alone = (
            model(input_ids=rows.ids[row, places][None], use_cache=False, return_dict=True).logits[0].float()
        )
        packed = head_logits(head, states[row, places]).float()
        error = (packed - alone).abs().amax(-1) / alone.abs().amax(-1).clamp_min(1e-30)
        # The median, since a near-tie in an expert's routing may go either way for single tokens.
        # transformers computes norms and rotations in float32 whatever the model's dtype.
        tolerance = 4 * max(torch.finfo(states.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        if not bool(alone.isfinite().all()):
            raise ValueError(
                f"{type(model).__name__} gives logits that are not finite, already for one sequence alone, "
                "so nothing can be compared; look for NaN or infinity in its weights, or use a wider dtype"
            )
        if not float(error.median()) <= tolerance:
            raise ValueError(
                f"{type(model).__name__} cannot read packed rows: its logits there differ from those of the "
                f"same sequence alone by {float(error.median()):.1e} of their size (tolerance "
                f"{tolerance:.0e}); something in it reads more than positions and visible tokens"
            )


@torch.no_grad()
def _check_isolation(model: PreTrainedModel, hidden: Hidden, rows: _Rows) -> None:
    """Other tokens in one sequence change no bit of another's hidden states."""
    before = hidden(rows.ids, rows.position_ids, rows.visible_until)
    for row, changed, kept in _Rows.SEPARATE:
        ids = rows.ids.clone()
        ids[row, changed] = (ids[row, changed] + 1) % rows.vocab_size
        after = hidden(ids, rows.position_ids, rows.visible_until)
        if torch.equal(before[row, kept], after[row, kept]):
            continue
        # Tokens routed elsewhere change the shapes of the experts' products, and so the others' rounding.
        if _has_experts(model) and not _gradient_leaks(model, hidden, rows, row, changed, kept):
            change = (before[row, kept] - after[row, kept]).norm() / before[row, kept].norm()
            if float(change) <= 16 * torch.finfo(before.dtype).eps:
                continue
        raise ValueError(
            f"{type(model).__name__} cannot read packed rows: other tokens in one sequence changed the "
            "hidden states of another, so something in it reads across the bounds of sequences"
        )


def _has_experts(model: nn.Module) -> bool:
    return any("expert" in type(module).__name__.lower() for module in model.modules())


@torch.enable_grad()
def _gradient_leaks(
    model: PreTrainedModel, hidden: Hidden, rows: _Rows, row: int, changed: Any, kept: Any
) -> bool:
    """Whether the kept positions' hidden states have any gradient at the changed positions' embeddings."""
    embeds = model.get_input_embeddings()(rows.ids).detach().requires_grad_()
    states = hidden(None, rows.position_ids, rows.visible_until, embeds)
    weight = torch.arange(states.shape[-1], device=states.device, dtype=states.dtype)
    (gradient,) = torch.autograd.grad((states[row, kept] * weight).sum(), embeds)
    return bool(gradient[row, changed].any())
