"""Demonstrations are played by the rules, are worth what the real sandbox says, and vary in skill."""

import pytest

from agentrl.gym.demonstrations import DemoConfig, Demonstration, demonstrations
from agentrl.gym.env import BugFixEnv
from agentrl.gym.programs import make_buggy, run_trusted, task_shapes
from agentrl.gym.sandbox import Sandbox
from agentrl.gym.tasks import Task


@pytest.fixture(scope="module")
def demos() -> list[Demonstration]:
    return list(demonstrations(0, 150, task_shapes(), DemoConfig()))


def test_they_are_the_same_for_the_same_seed(demos: list[Demonstration]) -> None:
    again = list(demonstrations(0, 20, task_shapes(), DemoConfig()))
    assert again == demos[:20]
    assert list(demonstrations(1, 20, task_shapes(), DemoConfig())) != again


def test_they_end_within_the_turns_and_every_action_parses(demos: list[Demonstration]) -> None:
    for demo in demos:
        assert len(demo.actions) == len(demo.observations) + 1 <= DemoConfig().max_turns
        assert demo.actions[-1] == "submit"
        assert not any(text.startswith("error") for text in demo.observations)
        assert demo.reward in (0.0, 1.0)


def test_skill_is_mixed(demos: list[Demonstration]) -> None:
    rate = sum(demo.reward for demo in demos) / len(demos)
    assert 0.1 < rate < 0.9


def test_rewards_agree_with_the_real_sandbox(
    demos: list[Demonstration], monkeypatch: pytest.MonkeyPatch
) -> None:
    import agentrl.gym.demonstrations as module

    played: list[Task] = []

    def recording(*args: object) -> object:
        task, program = make_buggy(*args)  # pyright: ignore[reportArgumentType]
        played.append(task)
        return task, program

    monkeypatch.setattr(module, "make_buggy", recording)
    again = list(demonstrations(0, 15, task_shapes(), DemoConfig()))
    assert again == demos[:15]
    with Sandbox() as sandbox:
        for task, demo in zip(played, again, strict=True):
            for execute in (sandbox.call, run_trusted):
                env = BugFixEnv(DemoConfig().max_turns, execute)
                assert env.reset(task) == demo.prompt
                results = [env.step(action) for action in demo.actions]
                assert [r.observation for r in results[:-1]] == demo.observations
                assert (results[-1].done, results[-1].reward) == (True, demo.reward)
