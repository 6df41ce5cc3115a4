"""HFPolicy on small random-weight models of every shown family, and the refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from agentrl.data.packing import pack_sequences  # noqa: E402
from agentrl.models.hf import HFPolicy  # noqa: E402
from agentrl.models.hf_probe import STATEFUL_FAMILIES  # noqa: E402
from agentrl.models.reference import alone_log_probs, mask_errors  # noqa: E402
from agentrl.models.scoring import as_policy, packed_log_probs, packed_logits  # noqa: E402

VOCAB = 61
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOW: dict[str, Any] = dict(
    head_dim=8, query_pre_attn_scalar=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("Qwen3Config", dict(head_dim=8)),
    "Qwen3Moe": (
        "Qwen3MoeConfig",
        dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    ),
    "Mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    "Llama": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "Mistral": ("MistralConfig", dict(sliding_window=6)),
    "Gemma2": ("Gemma2Config", dict(WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "Gemma3": ("Gemma3TextConfig", dict(WINDOW, final_logit_softcapping=3.0)),
    "Phi3": ("Phi3Config", {}),
    "Olmo2": ("Olmo2Config", {}),
    "Cohere": ("CohereConfig", dict(logit_scale=0.25)),
    "Granite": ("GraniteConfig", dict(logits_scaling=4.0)),
}


def build(family: str, **changes: Any) -> Any:
    """A small model with weights large enough for context to matter."""
    config_name, extra = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**SHAPE, **extra, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    difference = sum(float((got[n] - want[n]).square().sum()) for n in want)
    return (difference / sum(float(g.square().sum()) for g in want.values())) ** 0.5


@pytest.mark.parametrize("share", [False, True], ids=["flat", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_every_trajectory_alone(
    family: str, share: bool, related_trajectories, gradients
) -> None:
    policy = HFPolicy(build(family))
    packed = pack_sequences(related_trajectories(4, num_trajs=8, vocab=VOCAB), 60, share_prefixes=share)
    got, want = packed_log_probs(policy, packed), alone_log_probs(policy, packed)
    assert float((got - want).detach().abs().max()) <= 2e-5
    weights = torch.randn(len(got), generator=torch.Generator().manual_seed(0))
    error = relative_error(
        gradients(policy, packed_log_probs(policy, packed), weights), gradients(policy, want, weights)
    )
    assert error <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_wrapped_model_alone_keeps_every_bit(family: str) -> None:
    model = build(family).eval()
    ids = (torch.arange(30)[None] * 11 + 5) % VOCAB
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    before, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    segments = torch.arange(30)[None] // 18
    logits = packed_logits(model, ids, torch.arange(30)[None] - 18 * segments, segments)
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(model(ids, attention_mask=mask).logits, padded)
    # against the model itself: the head's scale and soft-cap, the windows and the attention's soft-cap
    torch.testing.assert_close(logits[:, :18], model(ids[:, :18]).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[:, 18:], model(ids[:, 18:]).logits, rtol=1e-4, atol=1e-5)
    generated = model.generate(ids[:, :9], attention_mask=torch.ones(1, 9), max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 12)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("Qwen3Moe", "Mixtral")])
def test_perturbing_one_sequence_leaves_the_others_bits(family: str, related_trajectories) -> None:
    policy = HFPolicy(build(family))
    packed = pack_sequences(related_trajectories(11, num_trajs=6, vocab=VOCAB), 60)
    before = packed_logits(policy, packed.ids, packed.position_ids, packed.segment_ids)
    mine = packed.segment_ids[0] == 0
    ids = packed.ids.clone()
    ids[0, mine] = (ids[0, mine] + 1) % VOCAB
    after = packed_logits(policy, ids, packed.position_ids, packed.segment_ids)
    assert torch.equal(before[0, ~mine], after[0, ~mine])
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0, mine], after[0, mine])


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_decoding_gives_the_hidden_states_of_whole_sequences(family: str) -> None:
    policy = HFPolicy(build(family))
    ids = (torch.arange(40).view(2, 20) * 17 + 3) % VOCAB
    whole = policy.hidden_states(ids, torch.arange(20).expand(2, 20), torch.full((2, 20), 20))
    cache = policy.new_cache(num_slots=4, max_tokens=20)
    slots = torch.tensor([3, 1])
    first = policy.extend(ids[:, :9], torch.tensor([9, 4]), slots, cache)
    torch.testing.assert_close(first, torch.stack([whole[0, 8], whole[1, 3]]), rtol=1e-4, atol=2e-5)
    cache.copy(3, torch.tensor([0]))
    ragged = torch.stack([ids[0, 9:14], ids[1, 4:9]])
    second = policy.extend(ragged, torch.tensor([2, 5]), torch.tensor([0, 1]), cache)
    torch.testing.assert_close(second, torch.stack([whole[0, 10], whole[1, 8]]), rtol=1e-4, atol=2e-5)
    assert cache.lengths.tolist() == [11, 9, 0, 9]
    cache.reset(torch.tensor([1]))
    again = policy.extend(ids[1:, :20], torch.tensor([20]), torch.tensor([1]), cache)
    torch.testing.assert_close(again[0], whole[1, 19], rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match="raise max_tokens"):
        policy.extend(ids[:, :1], torch.tensor([1, 1]), torch.tensor([1, 2]), cache)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_the_same_rows(
    reentrant: bool, related_trajectories, gradients
) -> None:
    policy = HFPolicy(build("Gemma2").train())
    packed = pack_sequences(related_trajectories(4, vocab=VOCAB), 60, share_prefixes=True)
    weights = torch.ones(len(packed.actions.target))
    plain = gradients(policy, packed_log_probs(policy, packed), weights)
    policy.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert relative_error(gradients(policy, packed_log_probs(policy, packed), weights), plain) <= 1e-6


def test_the_two_classic_masks_are_caught(related_trajectories) -> None:
    policy = HFPolicy(build("Qwen3"))
    errors = mask_errors(policy, pack_sequences(related_trajectories(7, num_trajs=16, vocab=VOCAB), 128))
    assert errors.visible <= 2e-5
    assert errors.causal_running_positions > 0.1
    assert errors.causal_restarted_positions > 0.1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Mamba", {}),
        ("FalconH1", {}),
        ("Jamba", {}),
        ("Qwen3Next", {}),
        ("Rwkv", {}),
    ],
)
def test_stateful_families_are_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    config = getattr(transformers, f"{name}Config")(**changes)
    assert config.model_type in STATEFUL_FAMILIES
    with torch.device("meta"):
        model = transformers.PreTrainedModel(config)
    with pytest.raises(ValueError, match=f"{config.model_type} cannot read packed rows.*along the row"):
        HFPolicy(model)


def test_an_unlisted_family_with_a_stateful_layer_is_refused() -> None:
    config = transformers.Qwen3Config(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ValueError, match="linear_attention"), torch.device("meta"):
        HFPolicy(transformers.PreTrainedModel(config))
    config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ValueError, match="chunked_attention"), torch.device("meta"):
        HFPolicy(transformers.PreTrainedModel(config))


def test_rope_that_depends_on_the_batch_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ValueError, match="dynamic RoPE"):
        HFPolicy(build("Llama", rope_parameters=rope))
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    policy = HFPolicy(build("Phi3", rope_parameters=rope, original_max_position_embeddings=32))
    ids = torch.ones(1, 40, dtype=torch.int64)
    policy.hidden_states(ids[:, :32], torch.arange(32)[None], torch.full((1, 32), 32))
    with pytest.raises(ValueError, match="LongRoPE"):
        policy.hidden_states(ids, torch.arange(40)[None], torch.full((1, 40), 40))


def test_dropout_while_training_is_refused() -> None:
    policy = HFPolicy(build("Llama", attention_dropout=0.1).train())
    rows = torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None], torch.full((1, 4), 4)
    with pytest.raises(ValueError, match="attention_dropout=0"):
        policy.hidden_states(*rows)
    policy.eval()
    policy.hidden_states(*rows)


def test_dropout_is_refused_after_the_model_was_shown_in_evaluation() -> None:
    model = build("Phi3", resid_pdrop=0.5).eval()
    policy = HFPolicy(model)
    ids = torch.tensor([[1, 2, 3]])
    rows = (ids, torch.arange(3)[None], torch.full_like(ids, 3))
    policy.hidden_states(*rows)
    model.train()
    with pytest.raises(ValueError, match="drops activations"):
        policy.hidden_states(*rows)


def test_rows_without_tokens_give_nothing() -> None:
    empty = torch.zeros(0, 8, dtype=torch.int64)
    hidden = HFPolicy(build("Qwen3")).hidden_states(empty, empty, empty)
    assert hidden.shape[:2] == (0, 8)


class Leak(nn.Module):
    """Plants a leak behind a layer: every position also gets a little of the one before it in the row."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **keywords: Any) -> Tensor:
        out = self.layer(hidden, **keywords)
        return out + 1e-4 * out.roll(1, dims=1)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_the_probe_sees_a_planted_leak(family: str) -> None:
    model = build(family)
    model.model.layers[0] = Leak(model.model.layers[0])
    policy = HFPolicy(model)
    for _ in range(2):  # it does not pass the second time either
        with pytest.raises(ValueError, match="cannot read packed rows"):
            packed_logits(policy, *(torch.zeros(1, 3, dtype=torch.int64),) * 2, torch.arange(3)[None])


def test_the_probe_sees_attention_that_it_does_not_compute() -> None:
    config = transformers.GptOssConfig(
        **SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=None
    )
    with pytest.raises(ValueError, match="attention sinks"):
        packed_logits(transformers.GptOssForCausalLM(config), *(torch.zeros(1, 1, dtype=torch.int64),) * 3)
    model = build("Qwen3")
    head = model.lm_head.forward
    model.lm_head.forward = lambda x: head(x) * 2.0  # a head that the config does not describe
    with pytest.raises(ValueError, match="logits there differ"):
        packed_logits(model, *(torch.zeros(1, 1, dtype=torch.int64),) * 3)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_experts_in_float64(family: str) -> None:
    """torch groups the products of experts up to float32 only; verify widens float32 models to float64."""
    model = build(family)
    narrow, ids = HFPolicy(model), (torch.arange(12)[None] * 7 + 3) % VOCAB
    places = torch.arange(12)[None], torch.full((1, 12), 12)
    with torch.no_grad():
        want = narrow.hidden_states(ids, *places)
        wide = HFPolicy(model.double())
        torch.testing.assert_close(wide.hidden_states(ids, *places).float(), want, rtol=1e-4, atol=1e-5)
        HFPolicy(build(family).double()).hidden_states(ids, *places)  # the probe too
        assert torch.equal(HFPolicy(model.float()).hidden_states(ids, *places), want)
    assert model.config._experts_implementation == "grouped_mm"  # as it was


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_called_that(value: float) -> None:
    model = build("Qwen3")
    with torch.no_grad():
        model.lm_head.weight[3] = value
    with pytest.raises(ValueError, match="gives logits that are not finite, already for one sequence alone"):
        packed_logits(model, *(torch.zeros(1, 1, dtype=torch.int64),) * 3)


def test_what_is_no_causal_lm_is_refused() -> None:
    with pytest.raises(ValueError, match="PreTrainedModel"):
        HFPolicy(nn.Linear(2, 2))  # pyright: ignore
    config = transformers.BloomConfig(
        vocab_size=9, hidden_size=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    with pytest.raises(ValueError, match="_supports_attention_backend"):
        as_policy(transformers.BloomForCausalLM(config))
