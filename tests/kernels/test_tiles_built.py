"""The compiled runner is there wherever it can be built: otherwise the tests of compiled merges are only skipped."""

from __future__ import annotations

import shutil

import pytest

from merganser.kernels import tiles


def test_the_runner_is_built_where_there_is_a_compiler() -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    assert tiles.library() is not None, "install again (pip install -e .) and look at what the compiler says"
