"""Peak memory of a computation, exact: every allocation counts, also those inside operators."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most bytes of tensors that `step()` holds at once, its result included, over what was held before.

    On CUDA these are the counters of PyTorch's allocator, on CPU the running sum of its events (the profiler,
    which records them, writes two lines to stderr). Bytes that step frees but did not allocate count as
    negative. Raises ValueError for any other device.

    >>> peak_bytes(lambda: torch.zeros(3, 100) + torch.zeros(1, 100))
    2800
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise ValueError(f"peak memory can be measured on cpu and cuda, got {device}")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = step()  # held until recording ends
    del result
    found: Any = recorded.profiler
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(0, *accumulate(event.nbytes() for event in events), 0)
