"""What a language model is told is what the environment does."""

from agentrl.gym.env import EDIT, RUN, SUBMIT, VIEW, BugFixEnv
from agentrl.gym.instructions import INSTRUCTIONS
from agentrl.gym.programs import run_trusted
from agentrl.gym.tasks import make_tasks


def test_the_actions_are_those_of_the_environment() -> None:
    _, *listed = INSTRUCTIONS.splitlines()[:5]
    assert listed == [VIEW, RUN, f"{EDIT} LINE TEXT", SUBMIT]
    task = next(task for task in make_tasks("train") if task.source.count("\n") >= 2)
    env = BugFixEnv(16, lambda source, name, cases: run_trusted(source, name, list(cases)))
    env.reset(task)
    assert env.step("view").observation.startswith("1 def ")
    assert env.step("run").observation.startswith("pass ")
    line = task.source.split("\n")[2]
    indentation = line.removesuffix(line.lstrip())
    assert "edit 3 return x makes line 3 return x" in INSTRUCTIONS
    assert env.step("edit 3 return x").observation == "ok\n"
    assert env.source.split("\n")[2] == f"{indentation}return x"
    assert env.step("submit").done
    assert INSTRUCTIONS.isascii()
