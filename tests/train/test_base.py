"""The supervised start: what its examples say, and that it is repeatable and kept."""

import sys
from pathlib import Path

import pytest
import torch

from agentrl.gym.demonstrations import DemoConfig, Demonstration, demonstrations
from agentrl.gym.programs import task_shapes
from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import Tokenizer, build_tokenizer
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.train import base
from agentrl.train.base import BaseConfig, cache_key, encoded, make_rl_base
from agentrl.train.config import TINY_POSITIONS

SMALL = BaseConfig(
    num_demonstrations=40, num_drills=10, num_steps=6, num_drill_steps=2, width=16, num_heads=2
)


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return build_tokenizer(make_tasks())


def demo() -> Demonstration:
    return next(demonstrations(3, 1, task_shapes(), DemoConfig(look_and_submit=0.0)))


def test_actions_are_what_the_player_said_each_with_the_end_token(tok: Tokenizer) -> None:
    played = demo()
    ids, is_action = encoded(played, tok.encode, tok.end_id, 256)
    said = [token for action in played.actions for token in (*tok.encode(action), tok.end_id)]
    assert ids[is_action].tolist() == said
    read = [token for text in (played.prompt, *played.observations) for token in tok.encode(text)]
    assert ids[~is_action].tolist() == read


def test_a_long_demonstration_is_cut(tok: Tokenizer) -> None:
    whole, cut = (encoded(demo(), tok.encode, tok.end_id, n) for n in (256, 20))
    for long, short in zip(whole, cut, strict=True):
        assert len(short) == 20 < len(long)
        assert torch.equal(long[:20], short)


def test_the_loss_counts_no_padding_and_two_first_actions(tok: Tokenizer) -> None:
    model = TinyAgent(TinyConfig(vocab_size=len(tok), width=16, num_heads=2)).double()
    examples = [
        encoded(d, tok.encode, tok.end_id, 256) for d in demonstrations(5, 3, task_shapes(), DemoConfig())
    ]
    assert len({len(ids) for ids, _ in examples}) > 1
    acted, observed = [], []
    (submit,) = tok.encode("submit")
    for ids, is_action in examples:
        scores = model(ids[None])[0, :-1].log_softmax(-1)
        logp = scores.gather(1, ids[1:, None])[:, 0]
        first = int(is_action[1:].nonzero()[0])
        share = SMALL.submit_unseen
        acted += [((1 - share) * logp[first] + share * scores[first, submit])[None]]
        acted += [logp[first + 1 :][is_action[first + 2 :]]]
        observed.append(logp[~is_action[1:]])
    wanted = -torch.cat(acted).mean() - SMALL.observation_weight * torch.cat(observed).mean()
    torch.testing.assert_close(base._loss(model, examples, SMALL, tok), wanted, rtol=1e-10, atol=0)


def test_gradients_of_batches_at_once_are_those_of_each_alone(tok: Tokenizer) -> None:
    model = TinyAgent(TinyConfig(vocab_size=len(tok), width=16, num_heads=2)).double()
    parameters = list(model.parameters())
    examples = [
        encoded(d, tok.encode, tok.end_id, 256) for d in demonstrations(5, 6, task_shapes(), DemoConfig())
    ]
    interval = sys.getswitchinterval()

    def gradients_of(batch: list[base.Example]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(base._loss(model, batch, SMALL, tok), parameters)

    with base._threads() as pool:
        halves = (examples[:3], examples[3:])
        found = list(pool.map(gradients_of, halves))
        assert sys.getswitchinterval() < interval
    assert sys.getswitchinterval() == interval
    for half, gradients in zip(halves, found, strict=True):
        for gradient, alone in zip(gradients, gradients_of(half), strict=True):
            assert torch.equal(gradient, alone)


def test_an_error_in_a_batch_is_raised_and_the_interpreter_left_as_it_was() -> None:
    interval = sys.getswitchinterval()
    with pytest.raises(ZeroDivisionError), base._threads() as pool:
        list(pool.map(lambda batch: batch / 0, [1, 2]))
    assert sys.getswitchinterval() == interval


def test_it_is_repeatable_cached_and_mended(tok: Tokenizer, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    first = make_rl_base(tok, SMALL, cache_dir=tmp_path, on_step=lambda *step: heard.append(step))
    assert heard == [(step, 6) for step in range(1, 7)]
    (path,) = tmp_path.iterdir()
    cached = make_rl_base(tok, SMALL, cache_dir=tmp_path, on_step=lambda *_: pytest.fail("trained again"))
    path.write_bytes(path.read_bytes()[:1000])
    again = make_rl_base(tok, SMALL, cache_dir=tmp_path)
    for other in (cached, again):
        for a, b in zip(first.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_where_nothing_can_be_kept_it_is_trained_all_the_same(tok: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"could not be kept.*Not a directory.*XDG_CACHE_HOME"):
        unkept = make_rl_base(tok, SMALL, cache_dir=tmp_path / "file" / "cache")
    kept = make_rl_base(tok, SMALL, cache_dir=tmp_path / "cache")
    for a, b in zip(unkept.parameters(), kept.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_knows_how_many_positions_the_base_has(tok: Tokenizer) -> None:
    assert BaseConfig().max_tokens == TINY_POSITIONS
    assert base._new_model(tok, BaseConfig()).config.max_positions == TINY_POSITIONS


def test_the_key_knows_configuration_and_vocabulary(tok: Tokenizer) -> None:
    other = BaseConfig(demos=DemoConfig(give_up=0.5))
    train_only = build_tokenizer(make_tasks("train"))
    keys = {cache_key(tok, BaseConfig()), cache_key(tok, other), cache_key(train_only, BaseConfig())}
    assert len(keys) == 3
