"""Settings that every test shares."""

import os
from pathlib import Path

import pytest
import torch

# Two test processes on two cores must not fight for them, and small products are faster on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `gpu` tests without a GPU, and `slow` ones unless -m asks for them."""
    if "slow" not in config.option.markexpr:
        skip = pytest.mark.skip(reason="slow: ask for it with -m slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def shared_data() -> Path:
    """The folder with real trajectories and measurements; the test is skipped where it is absent."""
    if not DATA.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return DATA
