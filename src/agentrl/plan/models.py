"""The shape of a language model: how many parameters multiply, and what attention, cache and state cost."""

# D width, H query heads, K key-value heads, V vocabulary; b bytes a cached number; T tokens of a sequence

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the cache holds one latent vector a
    token."""

    kv_rank: int  # width of the cached latent
    rope_dim: int  # width of the cached rotary key, shared by the heads
    nope_dim: int  # width of a head's key without position
    value_dim: int  # width of a head's value
    q_rank: int  # width of the query's latent; 0: queries are projected directly


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """A layer with a state instead of a cache (gated delta rule, arXiv:2412.06464), with a short
    convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_bytes: int  # bytes a number of the state

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward part of a mixture-of-experts layer: a router over routed experts, and shared ones."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    width: int  # hidden width of one routed expert
    shared_width: int = 0  # hidden width of all shared experts together

    def touched(self, num_tokens: float) -> float:
        """Expected number of experts that `num_tokens` tokens of one step read, routed evenly and
        independently.

        >>> experts = Experts(num_layers=1, num_experts=128, experts_per_token=8, width=1)
        >>> experts.touched(1), round(experts.touched(64), 1)
        (8.0, 125.9)
        """
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only language model as the planner sees it. Norms and biases are left out (below 0.1 %).

    Raises ValueError where a count is not positive or a part is missing.
    """

    name: str
    width: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_full_layers: int  # softmax attention over the whole context
    num_window_layers: int = 0  # softmax attention over the last `window` tokens
    window: int = 0
    num_linear_layers: int = 0  # a state instead of a cache
    ffn_width: int = 0  # hidden width of a dense feed-forward part (gate, up and down projections)
    tied_head: bool = False
    attention_gate: bool = False  # the query projection also gives an output gate
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    experts: Experts | None = None
    card_parameters: float | None = None  # the number on the model's card, which first-order sums use

    def __post_init__(self) -> None:
        for field in ("width", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "num_layers"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"model {self.name!r}: {field} must be at least 1, got {getattr(self, field)}"
                )
        if self.num_window_layers and self.window < 1:
            raise ValueError(f"model {self.name!r} has sliding-window layers but no window")
        if self.num_linear_layers and self.linear is None:
            raise ValueError(f"model {self.name!r} has linear-attention layers but no linear-attention shape")
        if self.num_dense_layers and self.ffn_width < 1:
            raise ValueError(f"model {self.name!r} has dense layers but no feed-forward width")

    @property
    def num_layers(self) -> int:
        """Number of layers of every kind."""
        return self.num_full_layers + self.num_window_layers + self.num_linear_layers

    @property
    def num_dense_layers(self) -> int:
        """Number of layers whose feed-forward part is dense."""
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, V * D, which multiply whether or not they are tied to the
        embedding."""
        return self.vocab_size * self.width

    @property
    def mixer_parameters(self) -> int:
        """Parameters of all attention and linear-attention layers; the output projection is H * head_dim *
        D."""
        D, H, K, d = self.width, self.num_heads, self.num_kv_heads, self.head_dim
        if (m := self.latent) is not None:
            key_dim = m.nope_dim + m.rope_dim
            query = D * m.q_rank + m.q_rank * H * key_dim if m.q_rank else D * H * key_dim
            key_value = D * (m.kv_rank + m.rope_dim) + m.kv_rank * H * (m.nope_dim + m.value_dim)
            softmax = query + key_value + H * m.value_dim * D
        else:
            softmax = D * H * d * (2 if self.attention_gate else 1) + 2 * D * K * d + H * d * D
        total = softmax * (self.num_full_layers + self.num_window_layers)
        if (s := self.linear) is not None:
            value = s.num_value_heads * s.value_dim
            projections = D * (s.conv_width + value + 2 * s.num_value_heads) + value * D
            total += self.num_linear_layers * (projections + s.conv_width * s.conv_kernel)
        return total

    def ffn_parameters(self, num_experts: float) -> float:
        """Parameters of all feed-forward parts with `num_experts` routed experts counted a layer."""
        total = 3.0 * self.width * self.ffn_width * self.num_dense_layers
        if (e := self.experts) is not None:
            one = 3 * self.width * (num_experts * e.width + e.shared_width)
            total += e.num_layers * (one + self.width * e.num_experts)
        return total

    @property
    def total_parameters(self) -> float:
        """Parameters held in memory: all experts, the embedding, and the head where it is not tied."""
        every = self.experts.num_experts if self.experts else 0
        embedding = self.head_parameters * (1 if self.tied_head else 2)
        return self.mixer_parameters + self.ffn_parameters(every) + embedding

    @property
    def active_parameters(self) -> float:
        """Parameters that multiply a token: active experts and the head, without the embedding's look-up."""
        active = self.experts.experts_per_token if self.experts else 0
        return self.mixer_parameters + self.ffn_parameters(active) + self.head_parameters

    def read_parameters(self, num_tokens: float) -> float:
        """Parameters that one decode step of `num_tokens` tokens reads: the experts that they touch, and the
        head."""
        touched = self.experts.touched(num_tokens) if self.experts else 0
        return self.mixer_parameters + self.ffn_parameters(touched) + self.head_parameters

    def weight_bytes(self, bytes_each: float) -> float:
        """Bytes of the weights in an engine; below two bytes each, embedding and head stay in two (as vLLM
        has it)."""
        embedding = self.head_parameters * (1 if self.tied_head else 2)
        return (self.total_parameters - embedding) * bytes_each + embedding * max(bytes_each, 2.0)

    def kv_layer_bytes(self, bytes_each: float = 2.0) -> float:
        """Bytes that one softmax layer caches a token."""
        if self.latent is not None:
            return (self.latent.kv_rank + self.latent.rope_dim) * bytes_each
        return 2 * self.num_kv_heads * self.head_dim * bytes_each

    def kv_bytes_per_token(self, bytes_each: float = 2.0) -> float:
        """Bytes of cache that each token of context adds: the layers that see the whole context."""
        return self.num_full_layers * self.kv_layer_bytes(bytes_each)

    def fixed_sequence_bytes(self, bytes_each: float = 2.0) -> float:
        """Bytes that a sequence holds however long it is: full windows, and the linear layers' states."""
        return self.num_window_layers * self.window * self.kv_layer_bytes(bytes_each) + self._state_bytes

    def sequence_bytes(self, context: float, bytes_each: float = 2.0) -> float:
        """Bytes of cache and state that a sequence of `context` tokens holds, which a decode step also
        reads."""
        windowed = self.num_window_layers * min(context, self.window) * self.kv_layer_bytes(bytes_each)
        return context * self.kv_bytes_per_token(bytes_each) + windowed + self._state_bytes

    @property
    def _state_bytes(self) -> float:
        if (s := self.linear) is None:
            return 0.0
        state = s.num_value_heads * s.key_dim * s.value_dim * s.state_bytes
        return self.num_linear_layers * (state + s.conv_width * (s.conv_kernel - 1) * 2.0)

    @property
    def _pair_width(self) -> int:
        # widths of a query-key product and of a value sum, over all heads
        if (m := self.latent) is not None:
            return self.num_heads * (m.nope_dim + m.rope_dim + m.value_dim)
        return 2 * self.num_heads * self.head_dim

    @property
    def _linear_flops(self) -> float:
        # read, correct and update a head's key_dim x value_dim state: two FLOPs an entry each
        if (s := self.linear) is None:
            return 0.0
        return self.num_linear_layers * 6.0 * s.num_value_heads * s.key_dim * s.value_dim

    def causal_flops_per_token(self, num_tokens: float) -> float:
        """Forward FLOPs of attention a token, averaged over a causal sequence: token t reads t/T of it on
        average.

        A layer with a window w < T reads w - w^2 / (2T) tokens on average instead of T / 2.
        """
        w = min(self.window, num_tokens)
        windowed = w - w * w / (2 * num_tokens) if num_tokens > 0 else 0.0
        reads = self.num_full_layers * num_tokens / 2 + self.num_window_layers * windowed
        return 2.0 * self._pair_width * reads + self._linear_flops

    def decode_flops_per_token(self, context: float) -> float:
        """Forward FLOPs of attention for one new token on `context` cached ones (latent attention:
        absorbed)."""
        pair = self._pair_width
        if (m := self.latent) is not None:
            pair = self.num_heads * (2 * m.kv_rank + m.rope_dim)
        reads = self.num_full_layers * context + self.num_window_layers * min(context, self.window)
        return 2.0 * pair * reads + self._linear_flops

    def forward_flops_per_token(self, num_tokens: float) -> float:
        """Forward FLOPs a token of a causal sequence of `num_tokens`: two a multiplying parameter, and
        attention."""
        return 2.0 * self.active_parameters + self.causal_flops_per_token(num_tokens)

    def train_flops_per_token(self, num_tokens: float) -> float:
        """Forward and backward FLOPs a token of a causal sequence of `num_tokens`; the backward is twice the
        forward.

        Counters that take the head dimension for width over heads are wrong for Qwen3-0.6B, whose heads are
        wider.
        """
        return 3.0 * self.forward_flops_per_token(num_tokens)

    @property
    def nominal_parameters(self) -> float:
        """N of the first-order sums: the number on the card where there is one, else the total."""
        return self.card_parameters if self.card_parameters is not None else self.total_parameters


def logits_bytes(num_tokens: int, vocab_size: int) -> int:
    """Bytes of float32 logits for `num_tokens` tokens: 4 * V each.

    >>> round(logits_bytes(1, 151_936) / 1e6, 2), round(logits_bytes(32_768, 151_936) / 1e9, 1)
    (0.61, 19.9)
    """
    if num_tokens < 0 or vocab_size < 1:
        raise ValueError(f"need num_tokens >= 0 and vocab_size >= 1, got {num_tokens} and {vocab_size}")
    return 4 * num_tokens * vocab_size


def check_positive(**values: float) -> None:
    """Raise ValueError, by name, for the first value that is not a positive finite number."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive, got {value}")
