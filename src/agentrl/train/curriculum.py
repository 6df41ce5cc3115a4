"""The task sampler as the trainer's curriculum, and training with the textbook's rule."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.curriculum.presets import preset
from agentrl.curriculum.sampler import RuleName, TaskSampler
from agentrl.data.trajectory import Trajectory
from agentrl.models.policy import Policy
from agentrl.rollout.episode import NamedTask, TextTokenizer
from agentrl.train.config import RLConfig
from agentrl.train.loop import train_rl


class SampledTasks:
    """A curriculum in which a `TaskSampler` says what each step may draw from.

    The sampler's keys are the tasks' names, `num_slots` the tasks of a step. `name` tells curricula apart: a
    run cannot change its own. With `varied_sizes`, tasks with more expected signal have larger groups.
    """

    def __init__(
        self,
        tasks: Sequence[NamedTask],
        sampler: TaskSampler,
        num_slots: int,
        name: str,
        *,
        varied_sizes: bool = False,
    ) -> None:
        self.sampler, self.name = sampler, name
        self._by_name = {task.name: task for task in tasks}
        self._num_slots, self._varied_sizes = num_slots, varied_sizes
        if self._by_name.keys() != set(sampler.keys):
            raise ValueError("the sampler's keys must be the names of the tasks")

    def pool(self, step: int) -> Sequence[Any]:
        """The tasks that the sampler offers for `step`."""
        return [self._by_name[str(key)] for key in self.sampler.pool(self._num_slots, step)]

    def group_sizes(self, chosen: Sequence[NamedTask], group_size: int, step: int) -> list[int]:
        """Episodes of each of the tasks that `step` drew; their sum is len(chosen) * group_size."""
        if not self._varied_sizes:
            return [group_size] * len(chosen)
        return self.sampler.group_sizes([task.name for task in chosen], group_size, step)

    def observe(self, sampled: Sequence[Trajectory], step: int) -> None:
        """Let the sampler learn from the rewards; episodes that broke are no evidence."""
        self.sampler.observe_trajectories(sampled, step)

    def metrics(self) -> dict[str, float]:
        """`TaskSampler.metrics` without its share of groups: the record has `zero_adv_frac` by trajectory."""
        return {name: value for name, value in self.sampler.metrics().items() if name != "zero_adv_frac"}

    def state_dict(self) -> dict[str, Any]:
        """The curriculum's name and the sampler's state."""
        return {"name": self.name, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ValueError for that of another curriculum."""
        if state.get("name") != self.name:
            made = f"curriculum {state['name']}" if "name" in state else "no curriculum"
            raise ValueError(
                f"the run was made with {made}, not {self.name}, and cannot change it; start a new run"
            )
        self.sampler.load_state_dict(state.get("sampler", {}))


def make_curriculum(
    rule: RuleName,
    tasks: Sequence[NamedTask],
    cfg: RLConfig,
    settings: Mapping[str, Any] | None = None,
    *,
    varied_sizes: bool = False,
) -> SampledTasks:
    """The curriculum of `agentrl train --curriculum RULE`, seeded with cfg.seed.

    `settings` are those of `preset`: low, high, revisit, fill. `uniform` draws from all tasks, number for
    number as no curriculum does.
    """
    given = {name: value for name, value in (settings or {}).items() if value is not None}
    sampler = preset(rule, [task.name for task in tasks], **given, seed=cfg.seed)
    name = ", ".join([rule, *(f"{key}={value}" for key, value in given.items())])
    if varied_sizes:
        name += ", group sizes"
    return SampledTasks(tasks, sampler, cfg.prompts_per_step, name, varied_sizes=varied_sizes)


def train_curriculum(
    model: Policy,
    tasks: Sequence[NamedTask],
    tok: TextTokenizer,
    cfg: RLConfig,
    steps: int,
    low: float = 0.0,
    high: float = 1.0,
    revisit: int = 1,
    *,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """`train_rl` whose steps draw only from tasks that seem neither solved nor hopeless; returns its history.

    A task's estimated pass rate starts at .5 and becomes the mean reward of its last group. A step draws from
    the tasks with low < estimate < high, strictly, and `revisit` random ones outside. Where these are fewer
    than cfg.prompts_per_step, it plays fewer episodes. With low=-1, high=2 every task is always inside, and
    the run is that of `train_rl`, number for number.

    Records have besides those of `train_rl`: `pool` (tasks that the step drew from), `n_episodes`, and the
    other figures of `TaskSampler.metrics`. Raises ValueError where not low < high, or revisit is no count.
    """
    sampler = TaskSampler.textbook([task.name for task in tasks], low, high, revisit, seed=cfg.seed)
    curriculum = SampledTasks(tasks, sampler, cfg.prompts_per_step, "band")
    return train_rl(model, tasks, tok, cfg, steps, curriculum=curriculum, on_step=on_step)
