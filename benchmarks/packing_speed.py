"""Seconds of a training step on padded batches, packed rows and prefix trees, and what wrong masks cost.

    python benchmarks/packing_speed.py [--repeats 5] [--threads 1] [--vocab-size 32000] [--synthetic]

A step is forward and backward of one loss over the action tokens; the ways of a comparison alternate within
the run and must give the same loss. The episodes are the supervised base's on the gym; `--synthetic` puts
random ones of the same shape and a TinyAgent with random weights in their place, which needs no gym.

How much the head saves depends on the vocabulary: 32,000 is that of Llama 2 and Mistral, and Qwen3's own is
151,936, whose full logits of one padded batch would fill 5 GB here.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

import agentrl as arl
from agentrl.models.hf import HFPolicy
from agentrl.models.policy import Policy
from agentrl.models.reference import mask_errors
from agentrl.models.tiny import TinyAgent, TinyConfig
from results import commit

SEED = 0
Step = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the same step."""

    name: str
    step: Step  # forward and backward; returns the loss
    positions: int  # that the model computes
    logits: int  # positions that the head computes


def padded(policy: Policy, trajs: list[arl.Trajectory], batch_size: int) -> Way:
    """Batches in the order given, each padded to its longest, full logits."""
    batches = [trajs[i : i + batch_size] for i in range(0, len(trajs), batch_size)]
    rows = [pad_sequence([t.ids for t in batch], batch_first=True) for batch in batches]
    masks = [pad_sequence([t.action_mask for t in batch], batch_first=True) for batch in batches]
    num_actions = sum(t.num_actions for t in trajs)

    def step() -> float:
        policy.module.zero_grad()
        loss = 0.0
        for ids, mask in zip(rows, masks, strict=True):
            part = -(arl.sequence_log_probs(policy, ids) * mask).sum() / num_actions
            part.backward()
            loss += part.item()
        return loss

    positions = sum(ids.numel() for ids in rows)
    return Way(f"padded, {batch_size} a batch, full logits", step, positions, positions)


def packed(policy: Policy, trajs: list[arl.Trajectory], max_tokens: int, share_prefixes: bool = False) -> Way:
    """Rows of at most max_tokens, one at a time, the head on action tokens only."""
    batch = arl.pack_sequences(trajs, max_tokens, share_prefixes=share_prefixes, pad_to=None)
    rows = batch.split()
    num_actions = sum(t.num_actions for t in trajs)

    def step() -> float:
        policy.module.zero_grad()
        loss = 0.0
        for row in rows:
            part = -arl.packed_log_probs(policy, row).sum() / num_actions
            part.backward()
            loss += part.item()
        return loss

    name = f"{'prefix trees' if share_prefixes else 'packed'}, rows of {max_tokens}, head on actions"
    return Way(name, step, batch.num_tokens, len(batch.actions))


def compare(title: str, ways: list[Way], repeats: int) -> None:
    """Print the median seconds of each way, alternating, and how many times faster than the first it is."""
    losses = [way.step() for way in ways]
    if max(abs(loss - losses[0]) for loss in losses) > 1e-4 * abs(losses[0]):
        raise ValueError(f"{title}: the ways compute different losses, {losses}")
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for way, own in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            way.step()
            own.append(time.perf_counter() - start)
    print(f"\n{title}\n")
    print("| way | positions | logits | loss | median s | min s | max s | times faster |")
    print("|---|---|---|---|---|---|---|---|")
    for way, loss, own in zip(ways, losses, seconds, strict=True):
        ratio = statistics.median(a / b for a, b in zip(seconds[0], own, strict=True))
        print(
            f"| {way.name} | {way.positions:,} | {way.logits:,} | {loss:.5f} | {statistics.median(own):.3f} "
            f"| {min(own):.3f} | {max(own):.3f} | {ratio:.2f} |"
        )


def qwen3(vocab_size: int) -> Policy:
    """Qwen3 of 4 layers and width 256, random weights."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
    )
    return HFPolicy(Qwen3ForCausalLM(config))


def agent_lengths(vocab_size: int) -> list[arl.Trajectory]:
    """64 sequences of 180 * exp(0.9 * randn) tokens in [32, 1024], a random quarter of the tokens actions."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = (180 * torch.exp(0.9 * torch.randn(64, generator=generator))).clamp(32, 1024).long()
    return [random_trajectory(n, 0.25, vocab_size, generator) for n in lengths.tolist()]


def attempts(vocab_size: int) -> list[arl.Trajectory]:
    """8 attempts at a prompt of 1024, responses of 128."""
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(1, vocab_size, (1024,), generator=generator)
    mask = (torch.arange(1151) >= 1023).float()
    return [
        arl.Trajectory(
            torch.cat([prompt, torch.randint(1, vocab_size, (128,), generator=generator)]), mask, -mask, 0.0
        )
        for _ in range(8)
    ]


def random_trajectory(
    num_tokens: int, action_share: float, vocab_size: int, generator: torch.Generator
) -> arl.Trajectory:
    ids = torch.randint(1, vocab_size, (num_tokens,), generator=generator)
    mask: Tensor = (torch.rand(num_tokens - 1, generator=generator) < action_share).float()
    return arl.Trajectory(ids, mask, -mask, 0.0)


def synthetic_episodes() -> tuple[Policy, list[arl.Trajectory]]:
    """A TinyAgent with random weights and 64 episodes with the gym's spread of lengths, 8 a prompt."""
    torch.manual_seed(SEED)
    policy = TinyAgent(TinyConfig(vocab_size=200))
    with torch.no_grad():
        policy.token_embedding.weight.mul_(10)  # so that the log-probs depend on the context at all
        policy.position_embedding.weight.mul_(10)
    generator = torch.Generator().manual_seed(SEED)
    lengths = (30 * torch.exp(0.8 * torch.randn(64, generator=generator))).clamp(12, 250).long()
    return policy, [random_trajectory(n, 0.3, 200, generator) for n in lengths.tolist()]


def gym_episodes() -> tuple[Policy, list[arl.Trajectory]]:
    """The supervised base and the 64 episodes of its first RL step."""
    tokenizer = arl.build_tokenizer(arl.make_tasks("all"))
    base, config = arl.make_rl_base(tokenizer), arl.RLConfig()
    generator = torch.Generator().manual_seed(SEED)
    tasks = arl.make_tasks("train")[:8]
    return base, arl.sample_groups(base, lambda: arl.make_env(config), tasks, tokenizer, config, generator)


def mask_table(policy: Policy, trajs: list[arl.Trajectory], max_tokens: int = 256) -> None:
    """Print the fill of the rows and the error of the right mask and of the two classic wrong ones."""
    batch = arl.pack_sequences(trajs, max_tokens)
    total, longest = sum(t.num_tokens for t in trajs), max(t.num_tokens for t in trajs)
    errors = mask_errors(policy, batch)
    print(
        f"\n{len(trajs)} episodes, {total:,} tokens: {len(batch.rows)} rows of {max_tokens}, "
        f"{total / batch.ids.numel():.1%} full; padded to {longest}, "
        f"{total / (longest * len(trajs)):.1%} full\n"
    )
    print("| mask | largest error of a log-prob, nats |")
    print("|---|---|")
    print(f"| visible_until | {errors.visible:.1e} |")
    print(f"| causal, running positions | {errors.causal_running_positions:.2f} |")
    print(f"| causal, restarted positions | {errors.causal_restarted_positions:.2f} |")


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if "model name" in line), "")
    except OSError:
        return platform.processor()


def provenance() -> str:
    """Commit, machine, command and seed, for the caption of a result."""
    machine = (
        f"{processor() or platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"
    )
    return (
        f"commit {commit()}; {machine}; "
        f"`python benchmarks/packing_speed.py {' '.join(sys.argv[1:])}`; seed {SEED}"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--max-tokens", type=int, default=2048, help="a packed row of Qwen3's")
    parser.add_argument("--synthetic", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(provenance())

    policy, trajs = synthetic_episodes() if args.synthetic else gym_episodes()
    mask_table(policy, trajs)
    compare(
        "TinyAgent, 64 episodes", [padded(policy, trajs, 64), packed(policy, trajs, 256 * 64)], args.repeats
    )
    policy, trajs = qwen3(args.vocab_size), agent_lengths(args.vocab_size)
    compare(
        f"Qwen3, 4 layers, width 256, vocabulary {args.vocab_size:,}, 64 sequences",
        [padded(policy, trajs, 8), packed(policy, trajs, args.max_tokens)],
        args.repeats,
    )
    trajs = attempts(args.vocab_size)
    compare(
        "Qwen3, 8 attempts at a prompt of 1024, responses of 128",
        [packed(policy, trajs, 2304), packed(policy, trajs, 2304, share_prefixes=True)],
        args.repeats,
    )


if __name__ == "__main__":
    main()
