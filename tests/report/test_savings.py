"""What the savings table and the splits say, from records whose sums are known."""

from pathlib import Path
from typing import Any

from agentrl.report.run import Batch, BatchRow, Run, StepRecord, Summary
from agentrl.report.savings import batch_section, savings_section, spent_section

FULL = {
    "tokens": 100, "action_tokens": 20, "sampled_actions": 30, "positions_sampled_padded": 200,
    "positions_padded": 120, "positions_packed": 60, "positions_tree": 45, "actions_tree": 20,
    "positions_decoded": 90, "positions_uncached": 900,
}  # fmt: skip


def run(*records: dict[str, Any], packing: str | None = None, batch: Batch | None = None) -> Run:
    steps = tuple(StepRecord(step=i, episodes=8, **record) for i, record in enumerate(records, start=1))
    config = {"rl": {"packing": packing}} if packing else {}
    return Run(path=Path("run"), config=config, records=steps, summary=Summary(), batch=batch)


def test_savings_add_up_over_steps() -> None:
    section = savings_section(run(FULL, FULL, packing="packed"))
    assert section is not None
    assert section.tables[0].rows == (
        ("skip groups without signal", "400", "240", "40%", "in use"),
        ("pack instead of pad", "240", "120", "50%", "in use"),
        ("compute shared prefixes once", "120", "90", "25%", "not in use"),
        ("logits at action tokens only", "120", "40", "67%", "in use"),
        ("keep keys and values while sampling", "1,800", "180", "90%", "in use"),
    )
    training = section.figures[0].body
    assert (
        "all that was sampled, padded: action tokens 60; prompt and tool tokens 140; padding 200" in training
    )
    assert "packed, shared prefixes once: action tokens 40; prompt and tool tokens 50; padding 0" in training


def test_what_is_in_use_follows_the_layout() -> None:
    for layout, used in {
        "padded": (0, 0, 0),
        None: (0, 0, 0),
        "packed": (1, 0, 1),
        "tree": (1, 1, 1),
    }.items():
        section = savings_section(run(FULL, packing=layout))
        assert section is not None
        assert tuple(row[4] == "in use" for row in section.tables[0].rows[1:4]) == used


def test_records_that_lack_the_counts() -> None:
    assert savings_section(run({"tokens": 5}, {})) is None
    without = {
        name: value for name, value in FULL.items() if "decoded" not in name and "uncached" not in name
    }
    section = savings_section(run(without))
    assert section is not None
    assert len(section.tables[0].rows) == 4


def test_tokens_are_split_by_what_became_of_them() -> None:
    tokens = spent_section(run(FULL, {"tokens": 50})).figures[1].body
    assert "whole run: action tokens that were learned from 20; their prompts and tool tokens 90; " in tokens
    silent = {"tokens": 50, "zero_adv_frac": 1.0}
    assert "in groups without signal 90 tokens" in spent_section(run(FULL, silent)).figures[1].body


def test_seconds_of_each_third() -> None:
    second = {"seconds_sampling": 2.0, "seconds_training": 1.0}
    body = spent_section(run(*[second] * 5)).figures[0].body
    for said in (
        "whole run: sampling 10.0; training 5.0",
        "steps 1 to 2: sampling 4.0",
        "steps 3 to 3: sampling 2.0",
    ):
        assert said in body


def test_logits_of_a_batch() -> None:
    row = BatchRow((("prompt", 3), ("action", 2), ("padding", 5)), (0,))
    batch = Batch(step=7, num_trajectories=9, num_shown=1, row_tokens=10, vocab_size=125_000,
                  layouts={"padded": (row,), "packed": (row,)})  # fmt: skip
    section = batch_section(run(batch=batch))
    assert section is not None
    assert "Step 7: the first 1 of the 9 trajectories" in section.figures[0].caption
    logits = section.figures[1].body  # 8 bytes x 125,000 = 1 MB a position
    for said in ("10.00 MB", "5.00 MB", "2.00 MB"):
        assert said in logits
    assert batch_section(run()) is None
