"""The supervised start: a TinyAgent that has watched demonstrations on generated programs, cached on disk."""

# B demonstrations of a batch, T padded width

import functools
import hashlib
import importlib.util
import json
import math
import os
import platform
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.gym.demonstrations import DemoConfig, Demonstration, demonstrations, drills
from agentrl.gym.env import SUBMIT
from agentrl.gym.programs import NAMES, task_shapes
from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import Tokenizer
from agentrl.models.policy import head_logits, threads_for
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.train.config import TINY_POSITIONS
from agentrl.train.muon import Muon

# Modules whose source decides what the supervised start becomes; their text is part of the cache's key.
_SOURCES = (
    *("agentrl.gym.tasks", "agentrl.gym.env", "agentrl.gym.tokenizer", "agentrl.gym.rewrites"),
    *("agentrl.gym.programs", "agentrl.gym.demonstrations", "agentrl.models.tiny", "agentrl.ops.attention"),
    *("agentrl.train.muon", "agentrl.train.base"),
)

# Batches of a step, each in a thread of its own, so that two idle cores share the work. A fixed number: the
# result does not depend on how many cores there are.
_BATCHES_PER_STEP = 2

Example = tuple[Tensor, Tensor]  # ids [n] int64 and is_action [n] bool of a demonstration


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseConfig:
    """How the supervised start is trained."""

    seed: int = 0
    num_demonstrations: int = 10_000
    num_drills: int = 2500
    num_steps: int = 2200
    num_drill_steps: int = 780  # the first of num_steps
    tokens_per_batch: int = 384
    lr: float = 6e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    submit_unseen: float = 0.4  # probability of submitting first, taught beside every first action
    observation_weight: float = 0.3  # of a token that the environment says, beside 1 for an action token
    max_tokens: int = TINY_POSITIONS
    width: int = 64
    num_layers: int = 4
    num_heads: int = 4
    demos: DemoConfig = field(default_factory=DemoConfig)


def encoded(demo: Demonstration, encode: Callable[[str], list[int]], end_id: int, max_tokens: int) -> Example:
    """ids [n] int64 and is_action [n] bool of a demonstration, cut where it outgrows max_tokens."""
    ids = list(encode(demo.prompt))
    is_action = [False] * len(ids)
    for turn, action in enumerate(demo.actions):
        tokens = [*encode(action), end_id]
        ids += tokens
        is_action += [True] * len(tokens)
        if turn < len(demo.observations):
            tokens = encode(demo.observations[turn])
            ids += tokens
            is_action += [False] * len(tokens)
    return torch.tensor(ids[:max_tokens]), torch.tensor(is_action[:max_tokens])


def _batches(examples: Sequence[Example], count: int, cfg: BaseConfig) -> list[list[Example]]:
    """`count` batches of demonstrations of similar length, each of about tokens_per_batch padded tokens."""
    rng = random.Random(cfg.seed)
    lengths = [len(ids) for ids, _ in examples]
    batches: list[list[int]] = []
    while len(batches) < count:
        order = sorted(range(len(lengths)), key=lambda i: (lengths[i] + rng.random() * 8, i))
        epoch: list[list[int]] = [[]]
        for i in order:
            if epoch[-1] and (len(epoch[-1]) + 1) * lengths[i] > cfg.tokens_per_batch:
                epoch.append([])
            epoch[-1].append(i)
        rng.shuffle(epoch)
        batches += epoch
    return [[examples[i] for i in batch] for batch in batches[:count]]


def _learning_rate(step: int, cfg: BaseConfig) -> float:
    warm = min(1.0, (step + 1) / cfg.warmup_steps)
    return cfg.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / cfg.num_steps)))


def make_rl_base(
    tok: Tokenizer,
    cfg: BaseConfig | None = None,
    *,
    cache_dir: Path | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> TinyAgent:
    """The supervised TinyAgent to start RL from: trained at the first call, then read from the cache.

    It can play BugFix but is far from perfect. The cache stands in `cache_dir` (default: `agentrl` in the
    user's cache folder) under a key of everything that decides the result: the configuration, the
    vocabulary, the sources, torch's version and the processor. A damaged cache file is replaced, and where
    none can be kept, a warning says so. `on_step(step, num_steps)` hears of progress while training.
    """
    cfg = cfg or BaseConfig()
    path = (cache_dir or default_cache_dir()) / f"base-{cache_key(tok, cfg)}.safetensors"
    model = _new_model(tok, cfg)
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError):  # none yet, cut short or not ours
        model = train_base(tok, cfg, on_step=on_step)
    else:
        return model
    try:
        _keep(model, path)
    except OSError as error:
        warnings.warn(
            f"the supervised base could not be kept, so the next run trains it again: {error}; "
            "set XDG_CACHE_HOME to a folder that can be written",
            stacklevel=2,
        )
    return model


def _keep(model: TinyAgent, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.part")  # others may be training the same one
    try:
        aside.write_bytes(save(model.state_dict()))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def default_cache_dir() -> Path:
    """`agentrl` in the folder where this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"


def cache_key(tok: Tokenizer, cfg: BaseConfig) -> str:
    """A digest of everything that decides what `train_base` gives."""
    digest = hashlib.sha256()
    machine = (torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    digest.update(json.dumps([asdict(cfg), tok.vocabulary, machine]).encode())
    for name in _SOURCES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()[:16]


def _new_model(tok: Tokenizer, cfg: BaseConfig) -> TinyAgent:
    shape = TinyConfig(
        vocab_size=len(tok),
        width=cfg.width,
        num_layers=cfg.num_layers,
        num_heads=cfg.num_heads,
        max_positions=cfg.max_tokens,
        init_seed=cfg.seed,
    )
    return TinyAgent(shape)


def _plan(tok: Tokenizer, cfg: BaseConfig) -> list[list[Example]]:
    """The batches of all steps: first the drills, then the demonstrations."""
    names = {task.name for task in make_tasks()}
    assert names.isdisjoint(NAMES), "generated programs must not bear a task's name"
    forbidden = task_shapes()
    lessons = (
        (drills(cfg.seed + 1, cfg.num_drills, forbidden), cfg.num_drill_steps),
        (
            demonstrations(cfg.seed, cfg.num_demonstrations, forbidden, cfg.demos),
            cfg.num_steps - cfg.num_drill_steps,
        ),
    )
    encode = functools.cache(tok.encode)  # nine texts of ten have been said before
    plan: list[list[Example]] = []
    for demos, num_steps in lessons:
        data = [encoded(demo, encode, tok.end_id, cfg.max_tokens) for demo in demos]
        plan += _batches(data, num_steps * _BATCHES_PER_STEP, cfg)
    return plan


def train_base(
    tok: Tokenizer, cfg: BaseConfig, *, on_step: Callable[[int, int], None] | None = None
) -> TinyAgent:
    """Train the supervised start from scratch: the same result for the same arguments on the same machine."""
    plan = _plan(tok, cfg)
    seen = torch.zeros(len(tok), dtype=torch.bool)
    for batch in plan:
        seen[torch.cat([ids for ids, _ in batch])] = True
    model = _new_model(tok, cfg)
    embedding = model.token_embedding.weight
    parameters = list(model.parameters())
    matrices = [weight for weight in model.layers.parameters() if weight.ndim == 2]
    muon = Muon(matrices, weight_decay=cfg.weight_decay)
    others = [p for p in parameters if not any(p is matrix for matrix in matrices)]
    adam = torch.optim.AdamW(others, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay, fused=True)
    with threads_for(model), _threads() as pool:
        for step in range(cfg.num_steps):
            lr = adam.param_groups[0]["lr"] = _learning_rate(step, cfg)
            batches = plan[step * _BATCHES_PER_STEP : (step + 1) * _BATCHES_PER_STEP]
            gradients = pool.map(
                lambda batch: torch.autograd.grad(_loss(model, batch, cfg, tok), parameters), batches
            )
            for parameter, *grads in zip(parameters, *gradients, strict=True):
                parameter.grad = sum(grads[1:], grads[0]) / _BATCHES_PER_STEP
            assert embedding.grad is not None
            embedding.grad[~seen] = 0.0
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            muon.step(lr, pool.map)
            adam.step()
            if on_step:
                on_step(step + 1, cfg.num_steps)
    _introduce_names(model, tok, cfg.seed)
    return model


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads for the batches of a step.

    Operations run without the interpreter's lock but need it in between. A thread that waits asks for it
    after 5 ms by default, a third of a batch; after 0.1 ms, two threads take 0.6 of the time of one.
    """
    num_threads = torch.get_num_threads()  # of an operation; threads do not inherit it
    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(_BATCHES_PER_STEP, "base", torch.set_num_threads, (num_threads,)) as pool:
        sys.setswitchinterval(1e-4)
        try:
            yield pool
        finally:
            sys.setswitchinterval(interval)


@torch.no_grad()
def _introduce_names(model: TinyAgent, tok: Tokenizer, seed: int) -> None:
    """Let the tasks' names start as the average name of a generated function, a little apart.

    No demonstration holds them. Trained along, as words that are never right, they would all have moved far
    out in one direction (five times the length of a word in use), and as input they would confuse the model.
    """
    embedding = model.token_embedding.weight
    names = [i for i, word in enumerate(tok.vocabulary) if word in {task.name for task in make_tasks()}]
    average = embedding[[tok.vocabulary.index(name) for name in NAMES]].mean(dim=0)
    noise = torch.randn(len(names), embedding.shape[1], generator=torch.Generator().manual_seed(seed))
    embedding[names] = average + 0.02 * noise


def _loss(model: TinyAgent, examples: Sequence[Example], cfg: BaseConfig, tok: Tokenizer) -> Tensor:
    """Mean loss of the action tokens, plus observation_weight times that of the observations.

    Reading along teaches where names repeat, which is what copying a line needs. The first action has two
    right answers, weighed by submit_unseen: an episode that submits at once holds nothing else to learn.
    """
    ids = pad_sequence([ids for ids, _ in examples], batch_first=True, padding_value=tok.pad_id)
    is_action = pad_sequence([mask for _, mask in examples], batch_first=True)[:, 1:]
    is_real = ids[:, 1:] != tok.pad_id
    position_ids = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = model.hidden_states(ids, position_ids, torch.full_like(ids, ids.shape[1]))
    logp_of = head_logits(model.head(), hidden[:, :-1][is_real]).log_softmax(-1)
    logp = logp_of.gather(1, ids[:, 1:][is_real][:, None])[:, 0]
    opens = (is_action & (is_action.cumsum(1) == 1))[is_real]
    (submit,) = tok.encode(SUBMIT)
    acted = is_action[is_real]
    right = torch.where(opens, logp.lerp(logp_of[:, submit], cfg.submit_unseen), logp)
    return -right[acted].mean() - cfg.observation_weight * logp[~acted].mean()
