"""One record of every foreign format, as its writer makes it, and a tokenizer of letters."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.data.chat import Message, Segment, chatml_segments
from agentrl.data.importers import import_trajectories
from agentrl.data.trajectory import Trajectory


class Letters:
    """One token a character: lengths and masks can be read off the text."""

    name = "letters"
    vocab_size = 0x110000

    def segments(self, messages: list[Message]) -> list[Segment]:
        return chatml_segments(messages)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CALLED = [
    {"role": "user", "content": "weather"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {"at": "sky"}}]},
    {"role": "tool", "content": "blue"},
    {"role": "assistant", "content": "blue"},
]
TAU = {"task_id": 7, "reward": 1.0, "trial": 2, "info": {}, "traj": CALLED}
SWE = {"environment": "swe_main", "history": CALLED, "trajectory": [], "info": {"exit_status": "submitted"}}
ATIF_TEXT = {
    "schema_version": "ATIF-v1.4",
    "session_id": "s1",
    "agent": {"name": "a", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "weather"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "looking",
            "tool_calls": [{"tool_call_id": "c", "function_name": "look", "arguments": {"at": "sky"}}],
            "observation": {"results": [{"source_call_id": "c", "content": "blue"}]},
        },
        {"step_id": 3, "source": "agent", "message": "blue"},
    ],
}


def atif_tokens() -> dict[str, Any]:
    record = copy.deepcopy(ATIF_TEXT)
    first = {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5], "logprobs": [-0.25, -0.5]}
    second = {"prompt_token_ids": [1, 2, 3, 4, 5, 6], "completion_token_ids": [7], "logprobs": [-1.0]}
    record["steps"][1]["metrics"], record["steps"][2]["metrics"] = first, second
    return record


VERIFIERS = {"example_id": 3, "prompt": TALK[:1], "completion": TALK[1:], "reward": 0.5, "task": "sums"}
VERIFIERS_TOKENS = {
    **VERIFIERS,
    "trajectory": [
        {
            "tokens": {
                "prompt_ids": [1, 2, 3],
                "prompt_mask": [0, 0, 0],
                "completion_ids": [4, 5],
                "completion_mask": [1, 1],
                "completion_logprobs": [-0.25, -0.5],
            }
        }
    ],
}
TRACE = {
    "version": 1,
    "id": "t1",
    "task": {"type": "Sums", "key": "sum-7", "data": {"idx": 7}},
    "rewards": {"right": {"score": 1.0, "weight": 0.5}, "style": {"score": 0.25}, "judge": None},
    "nodes": [
        {"message": TALK[0], "token_ids": [1, 2, 3], "mask": [False, False, False]},
        {
            "parent": 0,
            "message": TALK[1],
            "sampled": True,
            "token_ids": [9, 4, 5],
            "mask": [False, True, True],
            "logprobs": [-0.25, -0.5],
        },
        {
            "parent": 0,
            "message": TALK[1],
            "sampled": True,
            "token_ids": [9, 8],
            "mask": [False, True],
            "logprobs": [-1.0],
        },
    ],
}
NEMO = {
    "content": ["..."],
    "rewards": [1.0],
    "input_lengths": [5],
    "token_ids": [[1, 2, 3, 4, 5, 0, 0]],
    "token_loss_mask": [[0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]],
    "sample_loss_mask": [1.0],
    "generation_logprobs": [[0.0, 0.0, 0.0, -0.25, -0.5, 0.0, 0.0]],
    "prev_logprobs": [[0.0, -3.0, -3.0, -0.125, -0.5, 0.0, 0.0]],
    "idx": 0,
}
PRIME = {
    "schema_version": 1,
    "export_step": 4,
    "env_name": "sums",
    "token_ids": [1, 2, 3, 4, 5],
    "loss_mask": [False, False, False, True, True],
    "rewards": [None, None, None, 0.5, 0.5],
    "inference_logprobs": [0.0, 0.0, 0.0, -0.25, -0.5],
    "trainer_logprobs": [None, -3.0, -3.0, -0.125, -0.5],
}
VERL = {"input": "user\n2+2?\nassistant\n", "output": "4", "gts": "4", "score": 1.0, "step": 3}
TRL = {
    "step": 1,
    "prompt": "2+2?",
    "completion": "4",
    "accuracy_reward": 1.0,
    "style_reward": 0.5,
    "advantage": 0.7,
}
VERL_PARQUET = {
    "data_source": "sums",
    "prompt": TALK[:1],
    "responses": ["4", "5"],
    "reward_model": {"style": "rule"},
}
SLIME = {
    "group_index": 3,
    "index": 0,
    "prompt": "2+2?",
    "tokens": [1, 2, 3, 4, 5],
    "response_length": 2,
    "reward": 0.5,
    "loss_mask": [1, 1],
    "rollout_log_probs": [-0.25, -0.5],
    "status": "completed",
    "metadata": {},
}
MESSAGES = {"messages": CALLED, "reward": 1, "task": "sky"}
OWN = {
    "agentrl": 1,
    "ids": [1, 2, 3, 4, 5],
    "action_mask": [0, 0, 1, 1],
    "sample_logp": [0.0, 0.0, -0.25, -0.5],
    "reward": 0.5,
    "group": "g",
    "episode": "e",
    "info": {},
}
TEXT = {
    "tau-bench": TAU,
    "SWE-agent": SWE,
    "ATIF": ATIF_TEXT,
    "verifiers results": VERIFIERS,
    "verl dump": VERL,
    "messages": MESSAGES,
    "TRL completions": TRL,
    "verl parquet": VERL_PARQUET,
}
TOKENS = {
    "ATIF tokens": atif_tokens(),
    "verifiers results": VERIFIERS_TOKENS,
    "verifiers traces": TRACE,
    "NeMo-RL": NEMO,
    "prime-rl token export": PRIME,
    "slime": SLIME,
    "agentrl": OWN,
}
EXAMPLES = {**TEXT, **{f"{name}, tokens": record for name, record in TOKENS.items()}}


def read(path: Path, records: Iterable[Any], **options: Any) -> list[Trajectory]:
    """What the importers make of these records, one a line of `path`."""
    path.write_text("\n".join(json.dumps(record) for record in records))
    return list(import_trajectories(path, tokenizer=Letters(), **options))
