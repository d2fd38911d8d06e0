"""The model of time obeys what it says, the constants are measured, and large plans stay small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks.planning import CASES, measure_planning
from merganser import recipes
from merganser.cli import build
from merganser.errors import InputError
from merganser.scaling.llamas import SIZES, llama_shapes
from merganser.scaling.times import Machine, Resources, describe_work, merge_of, predict

MACHINE = Machine(
    cores=2, start_up=1.0, per_tensor=1e-3, write=5e8, read=1e9, read_cached=5e9, read_cached_all=9e9, latency=1e-4,
    elementwise=1e9, reduce_map=3e8, whole=1e10,
)  # fmt: skip
KINDS = ("elementwise", "reduce_map", "whole")


def test_llamas_have_the_published_numbers_of_parameters() -> None:
    published = {"1B": 1.5e9, "8B": 8.03e9, "70B": 70.6e9, "405B": 405.9e9}  # 1B: its embedding is tied, here it counts
    for size, shape in SIZES.items():
        entries = merge_of(llama_shapes(*shape), 1, "elementwise", itemsize=1).bytes_out
        assert entries == pytest.approx(published[size], rel=0.005)


@settings(max_examples=30)
@given(
    st.sampled_from(KINDS), st.integers(1, 256), st.integers(1, 16), st.integers(1, 16), st.sampled_from(sorted(SIZES))
)
def test_more_of_anything_never_takes_longer_and_no_stage_beats_its_share(
    kind: str, cores: int, disks: int, machines: int, size: str
) -> None:
    work = merge_of(llama_shapes(*SIZES[size]), 2, kind)
    alone, more = (predict(work, MACHINE, r) for r in (Resources(1), Resources(cores, disks, machines)))
    assert more.seconds <= alone.seconds + 1e-9
    assert more.seconds >= MACHINE.start_up + work.processor_seconds(MACHINE) / (cores * machines) - 1e-9
    assert more.seconds >= MACHINE.start_up + work.largest / MACHINE.whole - 1e-9
    assert more.limit in more.stages


def test_the_slowest_stage_sets_the_pace() -> None:
    work = merge_of(llama_shapes(*SIZES["8B"]), 2, "elementwise")
    assert predict(work, MACHINE, Resources(1, cached=True)).limit == "processors"
    assert predict(work, MACHINE, Resources(64)).limit == "disks"
    store = replace(MACHINE, read=1e11, write=1e11, latency=0.5)
    assert predict(work, store, Resources(64, 64)).limit == "latency"
    assert predict(work, replace(store, latency=0.0), Resources(64, 64)).stages["latency"] == 0
    structured = merge_of(llama_shapes(*SIZES["8B"]), 8, "whole")
    assert predict(structured, MACHINE, Resources(10**6, 10**6)).limit == "largest tensor"
    with pytest.raises(InputError, match="at least 1"):
        Resources(0)


def test_the_work_of_a_recipe_is_that_of_its_shapes(tmp_path: Path) -> None:
    shapes = {"a.weight": (24, 16), "b.weight": (8, 40), "b.bias": (8,)}
    for name in ("base", "math", "code"):
        (tmp_path / name).mkdir()
        save_file(
            {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}, tmp_path / name / "m.safetensors"
        )
        (tmp_path / name / "m.safetensors").rename(tmp_path / name / "model.safetensors")
    for method, kind in (("task_arithmetic", "elementwise"), ("ties", "reduce_map"), ("tsv", "whole")):
        document = {
            "method": method,
            "base": str(tmp_path / "base"),
            "models": [str(tmp_path / n) for n in ("math", "code")],
        }
        assert describe_work(recipes.prepare(recipes.load(document))) == merge_of(shapes, 2, kind)


def test_the_command_measures_and_predicts(tmp_path: Path) -> None:
    words = ["bench-machine", "--size", "4MB", "--directory", str(tmp_path), "--cores", "64", "--disks", "8", "--json"]
    result = CliRunner().invoke(build(), words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert all(value > 0 for value in found["machine"].values())
    assert found["resources"]["cores"] == 64
    assert len(found["predictions"]) == 12
    machine = Machine(**found["machine"])
    row = next(row for row in found["predictions"] if row["merge"] == "70B ties")
    again = predict(merge_of(llama_shapes(*SIZES["70B"]), 2, "reduce_map"), machine, Resources(64, 8))
    assert row["seconds"] == pytest.approx(again.seconds)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_no_directory_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(build(), ["bench-machine", "--directory", str(tmp_path / "absent")])
    assert isinstance(result.exception, InputError)
    assert "is not a directory" in str(result.exception)


@pytest.mark.parametrize(("case", "tensors"), [("70B", 723), ("moe", 10_169)])
def test_a_large_merge_is_planned_from_headers_in_little_memory(case: str, tensors: int, tmp_path: Path) -> None:
    found = measure_planning(tmp_path, llama_shapes(*CASES[case]))
    assert found["tensors"] == tensors
    assert found["bytes_in"] == merge_of(llama_shapes(*CASES[case]), 2, "reduce_map").bytes_in
    assert found["peak_bytes"] <= 300e6
    assert found["opens"] <= 3 * found["files"]
    assert not found["torch"]


def test_faster_machines_take_less() -> None:
    work = merge_of(llama_shapes(*SIZES["1B"]), 2, "reduce_map")
    faster = replace(MACHINE, reduce_map=2 * MACHINE.reduce_map)
    resources = Resources(1, cached=True)
    assert predict(work, faster, resources).seconds < predict(work, MACHINE, resources).seconds
