"""Text survives the tokenizer: all printable ASCII, and everything that the environment can say."""

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.gym.env import USAGE, BugFixEnv
from agentrl.gym.programs import run_trusted
from agentrl.gym.sandbox import Outcome
from agentrl.gym.tasks import Task, make_tasks
from agentrl.gym.tokenizer import Tokenizer, build_tokenizer

TOK = build_tokenizer(make_tasks("all"))
ASCII = string.printable[:95] + "\n"
ERRORS = (
    *("timeout", "memory limit", "sandbox stopped", "process exited", "process killed", "garbled answer"),
    *("process crashed (SIGSEGV)", "result too large", "result nested too deeply", "error"),
    *("not run after too many timeouts", "result is not plain data but function", "Odd_name2: x"),
    *("SyntaxError: '(' was never closed (line 1)", "ZeroDivisionError: division by zero", "SystemExit: 0"),
)


@settings(max_examples=400, deadline=None)
@given(st.text(ASCII, max_size=60))
def test_printable_ascii_comes_back(text: str) -> None:
    assert TOK.decode(TOK.encode(text)) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(TOK.vocabulary[2:]), max_size=25))
def test_what_a_policy_writes_means_the_same_once_read_back(tokens: list[str]) -> None:
    ids = [TOK.vocabulary.index(token) for token in tokens]
    text = TOK.decode(ids)
    assert TOK.decode(TOK.encode(text)) == text


def test_an_empty_text_has_no_tokens_and_specials_have_no_text() -> None:
    assert TOK.encode("") == []
    assert TOK.decode([TOK.pad_id, TOK.end_id, TOK.pad_id]) == ""
    assert TOK.pad_id not in TOK.encode("<pad>")
    assert TOK.end_id not in TOK.encode("<end>")


@pytest.mark.parametrize(("text", "place"), [("return \u00e9", 7), ("\t", 0), ("a\r", 1), ("\x00", 0)])
def test_other_characters_are_refused_by_name_and_place(text: str, place: int) -> None:
    message = f"cannot encode {text[place]!r} at position {place}: only printable ASCII"
    with pytest.raises(ValueError) as caught:
        TOK.encode(text)
    assert str(caught.value).startswith(message)


def said_by(env: BugFixEnv, task: Task, rng: random.Random) -> list[str]:
    lines = [
        *task.source.split("\n")[1:],
        *task.fixed.split("\n")[1:],
        "return (",
        "return 1 // 0",
        "while 1: 0",
    ]
    lines += ["return 'a\\u00e9  b'", "return {1: (x,), -2.5: None}", "return [-i for i in range(99)]"]
    said = [env.reset(task)]
    for _ in range(24):
        edit = f"edit {rng.randint(1, 7)} {rng.choice(lines)}"
        action = rng.choice(["view", "run", edit, edit, "edit 2", "what"])
        result = env.step(action)
        said.append(result.observation)
        if result.done:
            break
    return said


def test_all_that_the_environment_says_comes_back() -> None:
    rng = random.Random(0)
    said: set[str] = set()
    for task in make_tasks("all"):
        for error in ERRORS:

            def failing(_source: str, _name: str, cases: object, error: str = error) -> list[Outcome]:
                return [Outcome(False, None, error)] * len(list(cases))  # type: ignore[call-overload]

            env = BugFixEnv(execute=failing)
            said |= {env.reset(task), env.step("run").observation}
        for _ in range(3):
            said |= set(said_by(BugFixEnv(max_turns=30, execute=guarded), task, rng))
    assert any("raised" in text for text in said)
    assert any(USAGE in text for text in said)
    assert len(said) > 500
    for text in said:
        assert TOK.decode(TOK.encode(text)) == text


def guarded(source: str, name: str, arguments: object) -> list[Outcome]:
    """`run_trusted`, but endless loops and reserved words out of place do not get there."""
    cases = list(arguments)  # type: ignore[call-overload]
    if "while" in source:
        return [Outcome(False, None, "timeout")] * len(cases)
    if f"def {name}(" not in source:
        return [Outcome(False, None, "NameError: no function")] * len(cases)
    return run_trusted(source, name, cases)


def test_words_of_held_out_tasks_are_single_tokens_and_lines_are_short() -> None:
    for task in make_tasks("all"):
        assert len(TOK.encode(f"fix {task.name}\n")) == 3
        for line in task.fixed.split("\n")[1:]:
            assert len(TOK.encode(f"edit 2 {line.strip()}")) <= 16
    assert len(TOK) < 300


def test_a_line_number_is_another_token_than_the_digit() -> None:
    assert TOK.encode("edit 2 x = 2")[1] != TOK.encode("edit 2 x = 2")[-1]


def test_the_vocabulary_does_not_depend_on_the_order_of_words() -> None:
    words = ["clamp", "alpha", "zeta"]
    assert Tokenizer(words).vocabulary == Tokenizer(reversed(words)).vocabulary
    assert len(set(TOK.vocabulary)) == len(TOK) == len(TOK.vocabulary)
