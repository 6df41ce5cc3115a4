"""Configuration: typed, validated once, kept in a TOML file that flags override."""

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import tomli_w
import tyro

from agentrl.curriculum.presets import preset
from agentrl.curriculum.rules import RULES
from agentrl.curriculum.sampler import RuleName
from agentrl.data.advantages import ADVANTAGES
from agentrl.data.weights import check_mode
from agentrl.gym.instructions import INSTRUCTIONS

# How the trajectories of a microbatch become rows; see train/rows.
Packing = Literal["packed", "tree", "padded"]
# What a plan takes a sequence to cost; see train/rows.
PlanningCost = Literal["attention", "tokens"]
ComputeDtype = Literal["float32", "bfloat16"]

TINY_POSITIONS = 256  # of the TinyAgent that a run starts from without a model
# Played and held in memory at once; one of 256 tokens takes 20 kB.
MOST_EPISODES = 1_000_000
_MOST_TOKENS = 2**24  # of an episode; more than any model reads
_MOST_SAMPLES = 10_000  # a task; its rate is then known to half a point
_MOST_EPOCHS = 1_000
_MOST_THREADS = 1_024  # more cores than a machine has; OpenMP dies where it cannot start its threads


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_samples(name: str, num_samples: int) -> None:
    """Raises ValueError, naming the setting, where an evaluation cannot play that many episodes a task."""
    _require(num_samples >= 1, name, num_samples, "at least 1")
    _require(num_samples <= _MOST_SAMPLES, name, num_samples, f"at most {_MOST_SAMPLES:,} episodes a task")


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """What determines a run's learning: sampling, objective and optimizer.

    Raises ValueError, naming the field, for a value out of range.

    >>> RLConfig(lr=1e-3).group_size
    8
    """

    seed: int = 0
    """Seed of every random choice of the run."""
    lr: float = 5e-4
    """Learning rate of Adam, from 1e-12 to 10."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's first and second moment."""
    group_size: int = 8
    """Episodes of one task that are compared with each other."""
    prompts_per_step: int = 8
    """Tasks sampled a step; times group_size at most a million episodes."""
    temperature: float = 1.0
    """Sampling temperature; the trainer scores tokens at the same one."""
    max_tokens: int = 256
    """Tokens of an episode, prompt and observations included."""
    max_turns: int = 16
    """Actions of an episode."""
    loss_mode: str = "token_mean"
    """How token losses become one number: token_mean, sequence_mean, dr_grpo, ..."""
    norm_const: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Divisor of the loss modes `constant` and `sequence_sum_norm`, which need one."""
    advantage: Literal["group_std", "group_mean"] = "group_std"
    """Reward minus the group's mean, divided by its deviation or not."""
    clip_low: float = 0.2
    """The policy ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The policy ratio is clipped above 1 + clip_high."""
    kl_coef: float = 0.0
    """Weight of the KL term that holds the policy near where it started; 0 turns it off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which keeps the policy from settling early; 0 turns it off."""
    num_epochs: int = 1
    """Passes over a step's trajectories, at most 1,000."""
    num_minibatches: int = 2
    """Optimizer steps a pass."""
    packing: Packing = "packed"
    """Rows without padding, or with shared prefixes computed once, or padded: the slow reference."""
    microbatch_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Positions computed at once, at most; no value changes the gradient. Default: 4096, or max_tokens."""
    planning_cost: PlanningCost = "attention"
    """What ranks share evenly: FLOPs by the model's shape, attention included, or tokens."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; inf turns it off."""

    def __post_init__(self) -> None:
        for name in (
            "group_size",
            "prompts_per_step",
            "max_tokens",
            "max_turns",
            "num_epochs",
            "num_minibatches",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("lr", "temperature"):
            value = getattr(self, name)
            _require(0 < value < math.inf, name, value, "positive and finite")
        for name in ("clip_high", "kl_coef", "entropy_coef"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, value, "at least 0 and finite")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "at least 0 and below 2**63")
        packings = get_args(Packing)
        _require(self.packing in packings, "packing", self.packing, f"one of {', '.join(packings)}")
        costs = get_args(PlanningCost)
        _require(
            self.planning_cost in costs, "planning_cost", self.planning_cost, f"one of {', '.join(costs)}"
        )
        budget = self.microbatch_tokens
        wanted = f"at least max_tokens ({self.max_tokens}), the longest trajectory"
        _require(budget is None or budget >= self.max_tokens, "microbatch_tokens", budget, wanted)
        _require(self.max_tokens >= 2, "max_tokens", self.max_tokens, "at least 2, a prompt and an action")
        _require(0 <= self.clip_low <= 1, "clip_low", self.clip_low, "between 0 and 1")
        _require(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "positive")
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            self.betas,
            "two numbers from 0 to below 1",
        )
        _require(self.advantage in ADVANTAGES, "advantage", self.advantage, f"one of {', '.join(ADVANTAGES)}")
        check_mode(self.loss_mode, self.norm_const)
        self._check_sizes()
        self._check_scales()

    def _check_sizes(self) -> None:
        """Raises ValueError for a step that would not fit into memory, or not end."""
        num_episodes = self.prompts_per_step * self.group_size
        wanted = f"at most {MOST_EPISODES:,}, as a step holds all its episodes at once"
        _require(num_episodes <= MOST_EPISODES, "prompts_per_step x group_size", num_episodes, wanted)
        wanted = f"at most {_MOST_TOKENS:,}, which is more than any model reads"
        _require(self.max_tokens <= _MOST_TOKENS, "max_tokens", self.max_tokens, wanted)
        wanted = f"at most {_MOST_EPOCHS:,} passes over the same trajectories"
        _require(self.num_epochs <= _MOST_EPOCHS, "num_epochs", self.num_epochs, wanted)

    def _check_scales(self) -> None:
        """Raises ValueError for factors with which float32 weights would diverge at once, or never move."""
        wanted = "at most 10, as Adam moves every weight by about lr at once: the policy would diverge"
        _require(self.lr <= 10, "lr", self.lr, wanted)
        wanted = "at least 1e-12, as smaller steps change no float32 weight of ordinary size"
        _require(self.lr >= 1e-12, "lr", self.lr, wanted)
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            wanted = "at most 1e6, from where float32 loses the rest of the loss beside this term"
            _require(value <= 1e6, name, value, wanted)
        _require(self.clip_high <= 1e30, "clip_high", self.clip_high, "at most 1e30, to fit into float32")
        wanted = "between 1e-6 and 1e12, as float32 loses a loss divided by less or more"
        norm = self.norm_const
        _require(norm is None or 1e-6 <= norm <= 1e12, "norm_const", norm, wanted)
        wanted = "at least 1e-8, as Adam takes smaller gradients for 0"
        _require(self.max_grad_norm >= 1e-8, "max_grad_norm", self.max_grad_norm, wanted)

    @property
    def token_budget(self) -> int:
        """Positions that a microbatch computes, at most."""
        return self.microbatch_tokens or max(4096, self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run of `agentrl train`: how long, how often it evaluates and saves, where it computes."""

    # Without a name of its own, so that a value out of range is one line, as for every other setting.
    rl: Annotated[RLConfig, tyro.conf.arg(name="")] = field(default_factory=RLConfig)
    """What determines a run's learning; fixed when it starts."""
    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = None
    """Hugging Face causal LM to start from: a folder, or OWNER/NAME on the hub. Default: a TinyAgent."""
    instructions: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """What --model reads before every task; "" is nothing. Default: the task and its actions."""
    chat_template: bool = True
    """Frame turns with the chat template of --model, if it has one."""
    steps: int = 60
    """Training steps."""
    curriculum: RuleName = "top"
    """Which tasks a step plays: top (largest expected signal), band (the textbook), uniform (any), ..."""
    curriculum_low: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Tasks with an estimated pass rate of at most this are too hard. Default: 0; for pools 0.2."""
    curriculum_high: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Tasks with an estimated pass rate of at least this are too easy. Default: 1; for pools 0.8."""
    curriculum_revisit: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Slots for forgotten tasks: a share of all if below 1, else tasks a step. Default: 0.1; for band 1."""
    curriculum_fill: Annotated[bool | None, tyro.conf.arg(metavar="{True,False}", help_behavior_hint="")] = (
        None
    )
    """Whether slots that the rule leaves empty are played all the same. Default: True; for band False."""
    curriculum_group_sizes: bool = False
    """Give tasks with more expected signal larger groups; a step's episodes stay the same. Tasks then weigh
    alike only with loss_mode prompt_mean."""
    eval_samples: int = 16
    """Episodes a held-out task, in every evaluation; at most 10,000."""
    eval_every: int = 20
    """Steps between held-out evaluations; 0: only before and after training."""
    checkpoint_every: int = 10
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    threads: int = 1
    """CPU threads of one operation, at most 1,024; small models are fastest with one."""
    device: str = "cpu"
    """Where the model computes: cpu, cuda, cuda:1, ..."""
    compute_dtype: ComputeDtype = "float32"
    """What layers compute in; weights, gradients and moments are float32."""
    checkpoint_activations: bool = False
    """Keep only each layer's input and recompute the rest in backward: less memory, a third more work."""

    def __post_init__(self) -> None:
        _require(
            self.model is not None or not self.instructions,
            "instructions",
            self.instructions,
            "left out without --model: the TinyAgent cannot read them",
        )
        if self.model is not None and self.instructions is None:  # here, so that config.toml keeps the text
            object.__setattr__(self, "instructions", INSTRUCTIONS)
        wanted = f"at most {TINY_POSITIONS} without --model: the TinyAgent has no more positions"
        fits = self.model is not None or self.rl.max_tokens <= TINY_POSITIONS
        _require(fits, "max_tokens", self.rl.max_tokens, wanted)
        for name in ("steps", "eval_every"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        _require(self.curriculum in RULES, "curriculum", self.curriculum, f"one of {', '.join(RULES)}")
        dtypes = get_args(ComputeDtype)
        _require(
            self.compute_dtype in dtypes, "compute_dtype", self.compute_dtype, f"one of {', '.join(dtypes)}"
        )
        for name in ("checkpoint_every", "keep_checkpoints", "threads"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        wanted = f"at most {_MOST_THREADS:,}, which is more than a machine has cores"
        _require(self.threads <= _MOST_THREADS, "threads", self.threads, wanted)
        check_samples("eval_samples", self.eval_samples)
        preset(self.curriculum, ["any"], **self.curriculum_settings)  # raises for what does not fit
        wanted = "at least 2 where curriculum_group_sizes is set"
        _require(
            self.rl.group_size >= 2 or not self.curriculum_group_sizes,
            "group_size",
            self.rl.group_size,
            wanted,
        )

    @property
    def curriculum_settings(self) -> dict[str, Any]:
        """The settings of the curriculum, as `preset` takes them; None is the rule's own."""
        return {name: getattr(self, f"curriculum_{name}") for name in ("low", "high", "revisit", "fill")}


def known_keys(config: type = RunConfig, prefix: str = "") -> list[str]:
    """Dotted names of every setting.

    >>> known_keys()[:3]
    ['rl.seed', 'rl.lr', 'rl.betas']
    """
    names: list[str] = []
    for name, kind in _types(config).items():
        if isinstance(kind, type) and is_dataclass(kind):
            names += known_keys(kind, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def _types(config: type) -> dict[str, Any]:
    """The type of each field, without what only the command line reads."""
    hints = get_type_hints(config)
    return {entry.name: hints[entry.name] for entry in fields(config)}


def nearest_key(key: str) -> str:
    """A hint that names the setting most like `key`, else all of them.

    >>> nearest_key("group-sise")
    'did you mean rl.group_size?'
    """
    known = {name.rpartition(".")[2]: name for name in known_keys()}
    match = difflib.get_close_matches(key.rpartition(".")[2].replace("-", "_"), known, n=1)
    return f"did you mean {known[match[0]]}?" if match else f"settings are {', '.join(known_keys())}"


def _unknown_keys(values: Mapping[str, Any], config: type = RunConfig, prefix: str = "") -> list[str]:
    known = _types(config)
    unknown = [prefix + key for key in values if key not in known]
    for key, value in values.items():
        inner = known.get(key)
        if isinstance(inner, type) and is_dataclass(inner) and isinstance(value, Mapping):
            unknown += _unknown_keys(value, inner, f"{prefix}{key}.")
    return unknown


def load_config(path: Path) -> RunConfig:
    """The configuration in a TOML file; settings that it leaves out keep their defaults.

    Raises ValueError, naming the file, for TOML that does not parse, an unknown key (with the nearest known
    one), a wrong type or a value out of range.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:  # brackets without end
        raise ValueError(f"{path} is not TOML: {error}") from error
    for key in _unknown_keys(values):
        for name in known_keys():
            table, dot, setting = name.rpartition(".")
            if dot and f".{key}".endswith(f".{name}"):  # known, so that only quotes keep it from its table
                raise ValueError(
                    f'{path}: unknown key "{name}", which in quotes is one name with a dot in it; write '
                    f"{setting} = ... in the table [{table}], or {name} = ... unquoted before any table"
                )
        raise ValueError(f"{path}: unknown key {key!r}; {nearest_key(key)}")
    try:
        return msgspec.convert(values, RunConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error


def config_to_toml(config: RunConfig) -> str:
    """The configuration as TOML; settings that are None are left out, as TOML has no null."""

    def present(values: Mapping[str, Any]) -> dict[str, Any]:
        inner = {k: present(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        return {key: value for key, value in inner.items() if value is not None}

    return tomli_w.dumps(present(asdict(config)))


def config_hash(config: RLConfig) -> str:
    """Digest of the settings that a checkpoint depends on, to notice one that changed under it."""
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()[:16]
