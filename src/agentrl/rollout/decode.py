"""KV-cached decoding of many episodes at once, each at its own length and turn."""

# B rows of one call, K new tokens a row, D width, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agentrl.models.policy import KVCache, Policy, head_logits


@dataclass(slots=True)
class Stream:
    """The tokens of one episode while it is decoded, and its own source of randomness."""

    uniforms: np.ndarray  # [max_tokens] float64 in [0, 1): one number a position, in whatever company
    ids: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    sample_logp: list[float] = field(default_factory=list)  # nats; 0 for forced tokens
    num_cached: int = 0  # tokens whose keys and values stand in the cache
    num_computed: int = 0  # positions that went through the model for it; a prompt taken from another is not

    def force(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not choose: a prompt or an observation."""
        self.ids.extend(tokens)
        self.is_action.extend([False] * len(tokens))
        self.sample_logp.extend([0.0] * len(tokens))


class Player(Protocol):
    """One episode, as the decoder sees it."""

    stream: Stream

    def open(self) -> None:
        """Force the prompt into the stream; without one, the episode is over before it began."""
        ...

    def act(self, action: Sequence[int]) -> bool:
        """Take a finished action (without its end token), force the observation; False when it is over."""
        ...


@dataclass(slots=True)
class DecodeStats:
    """What the decoding cost."""

    num_positions: int = 0  # positions that went through the model
    num_without_cache: int = 0  # positions that re-reading the prefix for each sampled token would take
    num_calls: int = 0  # forward passes


def uniforms(seed: int, index: int, count: int) -> np.ndarray:
    """The random numbers [count] of episode `index`: a function of (seed, index) alone."""
    return np.random.Generator(np.random.Philox(key=[seed, index])).random(count)


@torch.no_grad()
def decode(
    model: Policy,
    players: Sequence[Player],
    *,
    end_id: int,
    max_tokens: int,
    temperature: float = 1.0,
    num_slots: int = 64,
) -> DecodeStats:
    """Play every player to its end; the streams then hold the tokens.

    A tick appends each running stream's forced tokens to the cache and samples one token for it, from the
    full softmax at `temperature`. An action ends with `end_id`, which is an action token like the others. A
    stream that reaches max_tokens stops there. The slot of a finished player goes to the next one, so long
    episodes do not hold up the others. Equal prompts that start in one tick are computed once. Raises
    ValueError for a temperature or a number of slots that is not positive, and for logits that give no
    distribution.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}")
    stats = DecodeStats()
    if not players:
        return stats
    num_slots = min(num_slots, len(players))
    cache = model.new_cache(num_slots, max_tokens)
    device = model.head().weight.device
    waiting = iter(players)
    slots: list[_Slot | None] = [None] * num_slots
    while True:
        for index in range(num_slots):
            while slots[index] is None and (player := next(waiting, None)) is not None:
                player.open()
                if player.stream.ids:
                    cache.reset(torch.tensor([index], device=device))
                    slots[index] = _Slot(index, player)
        running = [slot for slot in slots if slot is not None]
        if not running:
            return stats
        hidden = _append(model, cache, running, stats, device)
        tokens, logps = _sample(model, hidden, [slot.next_uniform() for slot in running], temperature)
        for slot, token, logp in zip(running, tokens, logps, strict=True):
            stats.num_without_cache += len(slot.player.stream.ids)
            if not slot.take(token, logp, end_id, max_tokens):
                slots[slot.index] = None


@dataclass(slots=True)
class _Slot:
    index: int
    player: Player
    action: list[int] = field(default_factory=list)

    def pending(self) -> list[int]:
        """Tokens of the stream that the cache does not hold yet; never empty while the player runs."""
        return self.player.stream.ids[self.player.stream.num_cached :]

    def next_uniform(self) -> float:
        return float(self.player.stream.uniforms[len(self.player.stream.ids)])

    def take(self, token: int, logp: float, end_id: int, max_tokens: int) -> bool:
        """Append a sampled token; False when the player is done."""
        stream = self.player.stream
        stream.ids.append(token)
        stream.is_action.append(True)
        stream.sample_logp.append(logp)
        if token == end_id:
            action, self.action = self.action, []
            if not self.player.act(action):
                return False
        else:
            self.action.append(token)
        return len(stream.ids) < max_tokens


def _append(
    model: Policy, cache: KVCache, running: Sequence[_Slot], stats: DecodeStats, device: torch.device
) -> Tensor:
    """Bring the cache up to date with every stream; returns the hidden states [B, D] of their last tokens."""
    leaders: dict[tuple[int, ...], _Slot] = {}
    followers: list[tuple[int, _Slot]] = []  # (place in `running`, the slot whose prompt it shares)
    computed: list[int] = []
    for place, slot in enumerate(running):
        if slot.player.stream.num_cached == 0:
            leader = leaders.setdefault(tuple(slot.player.stream.ids), slot)
            if leader is not slot:
                followers.append((place, leader))
                continue
        computed.append(place)
    parts: list[Tensor] = []
    places: list[int] = []
    # one call for the rows with a single new token and one for the others, so that few of them are padded
    for single in (True, False):
        chosen = [place for place in computed if (len(running[place].pending()) == 1) == single]
        if not chosen:
            continue
        pending = [running[place].pending() for place in chosen]
        width = max(map(len, pending))
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in pending], device=device)
        num_new = torch.tensor([len(tokens) for tokens in pending], device=device)
        indices = torch.tensor([running[place].index for place in chosen], device=device)
        parts.append(model.extend(ids, num_new, indices, cache))
        places.extend(chosen)
        for place, tokens in zip(chosen, pending, strict=True):
            running[place].player.stream.num_computed += len(tokens)
        stats.num_positions += sum(map(len, pending))
        stats.num_calls += 1
    row_of = {place: row for row, place in enumerate(places)}
    place_of = {slot.index: place for place, slot in enumerate(running)}
    by_leader: dict[int, list[int]] = {}
    for place, leader in followers:
        row_of[place] = row_of[place_of[leader.index]]
        by_leader.setdefault(leader.index, []).append(running[place].index)
    for source, targets in by_leader.items():
        cache.copy(source, torch.tensor(targets, device=device))
    for slot in running:
        slot.player.stream.num_cached = len(slot.player.stream.ids)
    return torch.cat(parts)[[row_of[place] for place in range(len(running))]]


def _sample(
    model: Policy, hidden: Tensor, draws: Sequence[float], temperature: float
) -> tuple[list[int], list[float]]:
    """A token for each hidden state [B, D], by inverting the cumulative sum, and its log-prob (nats).

    Raises ValueError where a row gives no distribution: a NaN in the logits, or an infinite one.
    """
    logp = torch.log_softmax(head_logits(model.head(), hidden).float() / temperature, dim=-1)
    cumulative = logp.double().exp().cumsum(-1)
    if not bool(cumulative[:, -1].isfinite().all()):  # NaN in any of them is NaN in the sum
        raise ValueError(
            f"logits at temperature {temperature} are not finite, so there is no token to sample: the "
            "policy's weights have diverged (lower lr, start from earlier ones) or the temperature is too low"
        )
    threshold = torch.tensor(draws, dtype=torch.float64, device=hidden.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    return tokens[:, 0].tolist(), logp.gather(-1, tokens)[:, 0].tolist()
