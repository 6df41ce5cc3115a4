"""Any Hugging Face causal LM as a Policy, through transformers' attention registry, its code untouched."""

# R rows, L row length, B slots, K new tokens a slot, V vocabulary, D width

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.models.hf_attention import KEYWORD, PackedRows, switch_attention
from agentrl.models.hf_cache import Append, HFCache
from agentrl.models.hf_probe import check_rope_length, float64_experts, probe, refuse_unsupported
from agentrl.models.policy import Head


class HFPolicy(nn.Module):
    """A transformers causal LM that reads packed rows and decodes ragged slots; a `models.policy.Policy`.

    Raises ValueError, when made, for a family whose layers carry state along the row, and at its first use
    for a model that a small probe cannot show to keep sequences apart and to agree with its own forward.
    The wrapped model stays usable on its own and gives the same bits as before.

    Mixture-of-experts auxiliary losses are not computed: the objective is the policy gradient alone.

    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> config = Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                      num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    >>> policy = HFPolicy(Qwen3ForCausalLM(config))
    >>> ids, positions = torch.tensor([[5, 6, 5]]), torch.tensor([[0, 1, 0]])
    >>> hidden = policy.hidden_states(ids, positions, torch.tensor([[2, 2, 3]]))
    >>> hidden.shape, torch.allclose(hidden[0, 0], hidden[0, 2], atol=1e-6)
    (torch.Size([1, 3, 16]), True)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
        refuse_unsupported(model)
        switch_attention(model)
        self.model = model

    @property
    def module(self) -> nn.Module:
        """The module that owns the parameters: the wrapped model."""
        return self.model

    def forward(self, ids: Tensor, position_ids: Tensor, visible_until: Tensor) -> Tensor:
        """Same as `hidden_states`, for wrappers that hook a module's forward."""
        return self.hidden_states(ids, position_ids, visible_until)

    def hidden_states(self, ids: Tensor, position_ids: Tensor, visible_until: Tensor) -> Tensor:
        """Last hidden states [R, L, D], after the final norm, of packed rows ids [R, L]; see Policy."""
        if ids.numel() == 0:
            weight = self.head().weight
            return weight.new_zeros(*ids.shape, weight.shape[1])
        probe(self.model, self._packed, self.head())
        return self._packed(ids, position_ids, visible_until)

    def head(self) -> Head:
        """The output head, with the soft-cap and the scale that the model's config gives."""
        linear = self.model.get_output_embeddings()
        if linear is None:
            raise ValueError(f"{type(self.model).__name__} has no output embeddings; wrap a ...ForCausalLM")
        config = self.model.config.get_text_config()
        scale: float | None = getattr(config, "logit_scale", None)  # Cohere
        if scale is None and getattr(config, "logits_scaling", None):  # Granite divides
            scale = 1.0 / config.logits_scaling
        softcap: float | None = getattr(config, "final_logit_softcapping", None)
        return Head(linear.weight, getattr(linear, "bias", None), softcap, scale)  # pyright: ignore

    def new_cache(self, num_slots: int, max_tokens: int) -> HFCache:
        """An empty cache for `num_slots` sequences of at most `max_tokens` tokens."""
        return HFCache(num_slots, max_tokens, self.model.device)

    @torch.no_grad()
    def extend(self, ids: Tensor, num_new: Tensor, slots: Tensor, cache: HFCache) -> Tensor:
        """Append the first num_new[b] >= 1 tokens of each row of ids [B, K] to slots [B] of the cache.

        Returns the hidden states [B, D] of the last appended tokens. Slots must be distinct.
        """
        probe(self.model, self._packed, self.head())
        append = Append.of(ids, num_new, slots, cache)
        hidden = self._forward(ids, append.position_ids, append)
        cache.lengths[slots] += num_new
        return hidden[torch.arange(len(slots), device=ids.device), num_new - 1]

    def _packed(
        self, ids: Tensor | None, position_ids: Tensor, visible_until: Tensor, embeds: Tensor | None = None
    ) -> Tensor:
        return self._forward(ids, position_ids, PackedRows(position_ids, visible_until), embeds)

    def _forward(
        self,
        ids: Tensor | None,
        position_ids: Tensor,
        call: PackedRows | Append,
        embeds: Tensor | None = None,
    ) -> Tensor:
        check_rope_length(self.model, position_ids)
        keywords: dict[str, Any] = {KEYWORD: call}
        if embeds is None:
            keywords["input_ids"] = ids
        else:
            keywords["inputs_embeds"] = embeds
        # transformers hands a mask of four axes on as it is, instead of building one of R * L * L entries.
        no_mask = position_ids[:, None, None, :]
        with float64_experts(self.model):
            return self.model.base_model(
                position_ids=position_ids,
                attention_mask=no_mask,
                use_cache=False,
                return_dict=True,
                **keywords,
            ).last_hidden_state
