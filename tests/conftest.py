"""What several test folders share."""

from __future__ import annotations

import gc
import os
import random
import shutil
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
os.environ.pop("COLUMNS", None)  # which xdist sets: what commands print must not depend on who runs the tests
# Imports make millions of objects; collecting garbage at Python's own pace took 8 % of the suite.
gc.set_threshold(20_000, 20, 20)


#: The file system in memory, and the bytes it must have free. Every merge syncs its files some ten times.
MEMORY, ROOM = Path("/dev/shm"), 4 << 30


def pytest_configure() -> None:
    """Put temporary files in memory, where syncing takes no time, unless a place for them is given.

    Some tests install packages, so programs must be allowed there.
    """
    if not os.access(MEMORY, os.W_OK) or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return
    if shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


#: Files of few, long tests. They come first, so that no worker is left alone with one of them at the end.
LONG = ("test_packages.py", "test_notebooks.py", "test_examples.py", "test_fuzz.py", "test_plugins.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Take what the imports have made out of garbage collection, which would visit all of it again and again."""
    gc.collect()
    gc.freeze()


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
