"""The supervised start: a TinyAgent that has watched demonstrations on generated programs, cached on disk."""

# B demonstrations of a batch, T padded width

import hashlib
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.gym.demonstrations import DemoConfig, Demonstration, demonstrations
from agentrl.gym.programs import NAMES, task_shapes
from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import Tokenizer
from agentrl.models.policy import head_logits
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.ops.log_probs import selected_log_probs
from agentrl.rollout.decode import threads_for

_FORMAT = 1  # raise when the demonstrations, the model or the training change in a way no other key shows


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseConfig:
    """How the supervised start is trained."""

    seed: int = 0
    num_demonstrations: int = 24_000
    num_steps: int = 2600
    tokens_per_step: int = 768
    lr: float = 4e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    max_tokens: int = 256
    width: int = 64
    num_layers: int = 4
    num_heads: int = 4
    demos: DemoConfig = field(default_factory=DemoConfig)


def encoded(demo: Demonstration, tok: Tokenizer, max_tokens: int) -> tuple[Tensor, Tensor]:
    """ids [n] int64 and is_action [n] bool of a demonstration, cut where it outgrows max_tokens."""
    ids = tok.encode(demo.prompt)
    is_action = [False] * len(ids)
    for turn, action in enumerate(demo.actions):
        tokens = [*tok.encode(action), tok.end_id]
        ids += tokens
        is_action += [True] * len(tokens)
        if turn < len(demo.observations):
            tokens = tok.encode(demo.observations[turn])
            ids += tokens
            is_action += [False] * len(tokens)
    return torch.tensor(ids[:max_tokens]), torch.tensor(is_action[:max_tokens])


def _batches(lengths: Sequence[int], cfg: BaseConfig) -> list[list[int]]:
    """num_steps batches of demonstrations of similar length, each of about tokens_per_step padded tokens."""
    rng = random.Random(cfg.seed)
    batches: list[list[int]] = []
    while len(batches) < cfg.num_steps:
        order = sorted(range(len(lengths)), key=lambda i: (lengths[i] + rng.random() * 8, i))
        epoch: list[list[int]] = [[]]
        for i in order:
            if epoch[-1] and (len(epoch[-1]) + 1) * lengths[i] > cfg.tokens_per_step:
                epoch.append([])
            epoch[-1].append(i)
        rng.shuffle(epoch)
        batches += epoch
    return batches[: cfg.num_steps]


def _learning_rate(step: int, cfg: BaseConfig) -> float:
    warm = min(1.0, (step + 1) / cfg.warmup_steps)
    return cfg.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / cfg.num_steps)))


def train_base(tok: Tokenizer, cfg: BaseConfig) -> TinyAgent:
    """Train the supervised start from scratch: the same result for the same arguments on the same machine."""
    names = {task.name for task in make_tasks()}
    assert names.isdisjoint(NAMES), "generated programs must not bear a task's name"
    demos = demonstrations(cfg.seed, cfg.num_demonstrations, task_shapes(), cfg.demos)
    data = [encoded(demo, tok, cfg.max_tokens) for demo in demos]
    model = TinyAgent(
        TinyConfig(
            vocab_size=len(tok),
            width=cfg.width,
            num_layers=cfg.num_layers,
            num_heads=cfg.num_heads,
            max_positions=cfg.max_tokens,
            init_seed=cfg.seed,
        )
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay, fused=True
    )
    with threads_for(model):
        for step, members in enumerate(_batches([len(ids) for ids, _ in data], cfg)):
            optimizer.param_groups[0]["lr"] = _learning_rate(step, cfg)
            loss = _loss(model, [data[i] for i in members], tok.pad_id)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def _loss(model: TinyAgent, members: Sequence[tuple[Tensor, Tensor]], pad_id: int) -> Tensor:
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in members], batch_first=True, padding_value=pad_id)
    is_action = torch.nn.utils.rnn.pad_sequence([mask for _, mask in members], batch_first=True)[:, 1:]
    position_ids = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = model.hidden_states(ids, position_ids, torch.full_like(ids, ids.shape[1]))
    logits = head_logits(model.head(), hidden[:, :-1][is_action])
    return -selected_log_probs(logits, ids[:, 1:][is_action]).mean()
