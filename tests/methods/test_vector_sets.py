"""The bits of a merge do not depend on how wide the vectors of the processor are."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

SHAPES = {"big": (700, 640), "odd": (37, 41), "bias": (133,), "cube": (3, 40, 50)}
#: Reductions decide these; the rest works on every entry by itself.
REDUCING = ("slerp", "nuslerp", "karcher", "multislerp", "model_stock", "sce")


def digests(methods: bool = True) -> dict[str, str]:
    """Of what the reducing methods find before they merge, and of every method that decomposes nothing."""
    import merganser as mg
    from merganser.kernels import spheres
    from merganser.methods.registry import parameters, registry

    torch.set_num_threads(1)
    numbers = np.random.Generator(np.random.PCG64(0))
    base, *models = (
        {name: torch.tensor(numbers.uniform(-1, 1, shape)).float() for name, shape in SHAPES.items()} for _ in range(4)
    )
    found = {}
    for number, name in enumerate(SHAPES):
        matrix = spheres.combine([spheres.gram([model[name] for model in models])])
        rows = spheres.sums(models[0][name] * models[1][name], -1 if number % 2 else 0)
        found[f"reductions, {name}"] = hashlib.sha256(matrix.tobytes() + rows.numpy().tobytes()).hexdigest()
    for method, rule in registry().items() if methods else ():
        if rule.reach == "whole" or rule.statistics:
            continue
        count = int(min(rule.models[1], 3))
        required = {key: 0.3 for key, parameter in parameters(rule).items() if parameter.required}
        with_base = base if rule.base == "required" else None
        merged = mg.merge(models[:count], method, base=with_base, seed=1, **required)
        content = b"".join(merged[name].numpy().tobytes() for name in SHAPES)
        found[method] = hashlib.sha256(content).hexdigest()
    return found


def run_with(capability: str | None, methods: bool = True) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    if capability is not None:
        environment["ATEN_CPU_CAPABILITY"] = capability
    script = f"import json, test_vector_sets; print(json.dumps(test_vector_sets.digests({methods})))"
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    return run_with(None)


def test_as_wide_as_they_are_or_narrower(here: dict[str, str]) -> None:
    """AVX2, AVX-512: other widths, the same fused multiply-add."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("a processor without AVX2")
    narrow = run_with("avx2")
    assert set(REDUCING) < set(narrow)
    assert [name for name in here if here[name] != narrow[name]] == []


def test_reductions_without_any_vectors(here: dict[str, str]) -> None:
    plain = run_with("default", methods=False)
    names = [name for name in here if name.startswith("reductions")]
    assert len(names) == len(SHAPES)
    assert [name for name in names if here[name] != plain[name]] == []
