"""Trajectories to verify with: the usable ones of a file, or some sampled from the policy's own cache."""

# S trajectories, V vocabulary

from collections.abc import Sequence

import torch

from agentrl.data.packing import pack_sequences
from agentrl.data.trajectory import Trajectory
from agentrl.models.policy import Policy, head_logits


@torch.no_grad()
def generate_trajectories(
    policy: Policy,
    *,
    num_groups: int = 2,
    group_size: int = 2,
    turns: int = 2,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Trajectory]:
    """num_groups * group_size short trajectories, those of a group with one prompt, of random ids.

    Prompts and observations are drawn evenly from the vocabulary; actions, and the log-probs recorded for
    them, are the policy's own, decoded at `temperature` from its cache: what the trainer computes at step 0
    must be the same.

    >>> from agentrl.models.tiny import TinyAgent, TinyConfig
    >>> [t.num_tokens for t in generate_trajectories(TinyAgent(TinyConfig(vocab_size=11)))]
    [52, 47, 59, 54]
    """
    head = policy.head()
    device, vocab_size = head.weight.device, head.weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    num_actions, num_observed = 12, 4
    streams: list[list[int]] = []
    for group in range(num_groups):
        prompt = torch.randint(vocab_size, (24 + 7 * group,), generator=generator).tolist()
        streams += [list(prompt) for _ in range(group_size)]
    masks = [[0.0] * len(ids) for ids in streams]
    logps = [[0.0] * len(ids) for ids in streams]
    num_held = [0] * len(streams)
    longest = max(map(len, streams)) + turns * (num_actions + num_observed)
    cache = policy.new_cache(len(streams), longest)
    slots = torch.arange(len(streams), device=device)
    for turn in range(turns):
        for step in range(num_actions):
            new = [ids[held:] for ids, held in zip(streams, num_held, strict=True)]
            num_held = [len(ids) for ids in streams]
            width = max(map(len, new))
            rows = torch.tensor([ids + [0] * (width - len(ids)) for ids in new], device=device)
            counts = torch.tensor([len(ids) for ids in new], device=device)
            logits = head_logits(head, policy.extend(rows, counts, slots, cache)) / temperature
            logp_of = torch.log_softmax(logits.double(), -1).cpu()
            tokens = torch.multinomial(logp_of.exp(), 1, generator=generator)
            sampled = zip(
                tokens.flatten().tolist(), logp_of.gather(1, tokens).flatten().tolist(), strict=True
            )
            for i, (token, logp) in enumerate(sampled):
                streams[i].append(token)
                masks[i].append(1.0)
                logps[i].append(logp)
            if turn < turns - 1 and step == num_actions - 1:
                for ids, mask, logp in zip(streams, masks, logps, strict=True):
                    ids += torch.randint(vocab_size, (num_observed,), generator=generator).tolist()
                    mask += [0.0] * num_observed
                    logp += [0.0] * num_observed
    found = [
        (ids[:n], mask[1:n], logp[1:n], str(i // group_size))
        for i, (ids, mask, logp) in enumerate(zip(streams, masks, logps, strict=True))
        # of different lengths, as episodes are: 5 tokens less from one to the next of a group
        for n in [len(ids) - 5 * (i % group_size)]
    ]
    return [
        Trajectory(torch.tensor(ids), torch.tensor(mask), torch.tensor(logp), 0.0, {"task": task})
        for ids, mask, logp, task in found
    ]


def usable_trajectories(policy: Policy, trajs: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with action tokens, and a branch of the shortest where they share little."""
    vocab_size = policy.head().weight.shape[0]
    for i, traj in enumerate(trajs):
        if int(traj.ids.max()) >= vocab_size:
            raise ValueError(
                f"trajectory {i} holds id {int(traj.ids.max())}, but the model's vocabulary ends at "
                f"{vocab_size - 1}; name the tokenizer of this model"
            )
    chosen = [traj for traj in trajs if traj.num_actions]
    if not chosen:
        raise ValueError(f"none of the {len(trajs)} trajectories has an action token; raise the cut, if any")
    total = sum(traj.num_tokens for traj in chosen)
    if len(chosen) < 2 or pack_sequences(chosen, total, share_prefixes=True).num_tokens > 0.9 * total:
        chosen += [_branch(min(chosen, key=lambda traj: traj.num_tokens))]
    return chosen


def _branch(traj: Trajectory) -> Trajectory:
    """The first half of a trajectory, followed by its last quarter."""
    n = traj.num_tokens
    half, tail = -(-n // 2), max(1, n // 4)
    mask = torch.cat([traj.action_mask[: half - 1], torch.ones(1), traj.action_mask[n - tail :]])
    ids = torch.cat([traj.ids[:half], traj.ids[n - tail :]])
    return Trajectory(ids, mask, torch.full_like(mask, float("nan")), traj.reward, group=traj.group)
