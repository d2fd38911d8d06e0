"""What several test folders share."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file

from benchmarks.zoo.cards import default_data

# The machine may be busy: no test is about time.
settings.register_profile("merganser", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("merganser")
# Some processors' matrix units trip over bfloat16 products unless told to keep to AVX-512.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same numbers in whatever order and process it runs; another seed finds fragile ones."""
    seed = int(os.environ.get("MERGANSER_TEST_SEED", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data sets, for tests that want them."""
    path = default_data()
    if not path.is_dir():
        pytest.skip(f"no data at {path}; set MERGANSER_DATA")
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes tensors as a Hugging Face-like directory and returns its path."""

    def write(name: str, tensors: dict[str, torch.Tensor], config: str = "{}") -> Path:
        directory = tmp_path / name
        directory.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(config)
        return directory

    return write
