"""What holds for every policy: threads of a small one are given back."""

import pytest
import torch

from agentrl.models.policy import threads_for
from agentrl.models.tiny import TinyAgent, TinyConfig


@pytest.mark.parametrize(("width", "threads"), [(128, 1), (132, 3)])
def test_a_small_model_takes_one_thread_and_gives_the_others_back(width: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads_for(TinyAgent(TinyConfig(vocab_size=5, width=width, num_layers=1))):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
