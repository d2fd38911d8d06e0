from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import merganser as mg
from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.memory import StateDict
from merganser.engine import blocks
from merganser.engine.compute import Arithmetic
from merganser.engine.execute import Progress, execute
from merganser.engine.footprint import memory_bound
from merganser.engine.layout import lay_out
from merganser.engine.merge import Merge
from merganser.engine.modules import ModuleSink, ModuleTensors
from merganser.engine.nested import Merged
from merganser.engine.plan import Plan
from merganser.engine.sinks import DictSink
from merganser.engine.writer import CheckpointWriter, Destination
from merganser.errors import InputError, MerganserError
from support.plans import make_plan, random_models

METHODS = ["linear", "task_arithmetic", "slerp", "ties", "dare_ties", "della", "model_stock"]


def merged(plan: Plan, sources: list[StateDict], workers: int = 2, **options: object) -> dict[str, Tensor]:
    sink = DictSink(plan)
    execute(Merge(plan, sources), sink, workers=workers, **options)  # type: ignore[arg-type]
    return sink.result()


def plan_for(method: str, models: list[dict[str, Tensor]]) -> tuple[Plan, list[StateDict]]:
    chosen = models[:3] if method == "slerp" else models
    return make_plan(chosen, method, {"t": 0.3} if method == "slerp" else {})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", METHODS)
def test_workers_memory_and_blocks_change_no_bit(
    method: str, models: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, sources = plan_for(method, models)
    reference = merged(plan, sources, workers=1)
    assert same(reference, merged(plan, sources, workers=4))
    assert same(reference, merged(plan, sources, workers=3, memory=1))
    monkeypatch.setattr("merganser.engine.blocks.SPAN", blocks.BLOCK)
    assert same(reference, merged(plan, sources, workers=2))
    monkeypatch.undo()


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "dare_ties"])
def test_elementwise_results_do_not_depend_on_the_block_size(
    method: str, models: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, sources = plan_for(method, models)
    reference = merged(plan, sources)
    for size in (7, 1000, 1 << 20):
        monkeypatch.setattr("merganser.engine.blocks.BLOCK", size)
        assert same(reference, merged(plan, sources))


def test_sources_are_told_what_will_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merganser.engine.execute.SPAN", 10_000)
    monkeypatch.setattr("merganser.engine.blocks.SPAN", 10_000)
    monkeypatch.setattr("merganser.engine.blocks.BLOCK", 5_000)
    blocks.spans.cache_clear()
    told: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    plan, sources = make_plan([{"big": torch.randn(100, 500)} for _ in told], "task_arithmetic")
    for number, source in enumerate(sources):
        monkeypatch.setattr(source, "prefetch", lambda name, rows, number=number: told[number].append(rows))
    merged(plan, sources)
    blocks.spans.cache_clear()
    assert all(rows == [(start, start + 20) for start in range(0, 100, 20)] for rows in told.values())


def test_inputs_are_untouched(models: list[dict[str, Tensor]]) -> None:
    before = [{k: v.clone() for k, v in m.items()} for m in models]
    for method in METHODS:
        merged(*plan_for(method, models))
    assert all(same(a, b) for a, b in zip(models, before, strict=True))


def test_integers_are_copied(models: list[dict[str, Tensor]]) -> None:
    assert torch.equal(merged(*make_plan(models, "linear"))["steps"], torch.tensor([7, 9]))


def test_a_live_module_takes_the_result() -> None:
    nets = [nn.Linear(5, 4) for _ in range(3)]
    plan, sources = make_plan([dict(net.state_dict()) for net in nets], "linear")
    target = nn.Linear(5, 4)
    execute(Merge(plan, sources), ModuleSink(ModuleTensors(target)))
    torch.testing.assert_close(target.weight, (nets[1].weight + nets[2].weight) / 2)


def test_nan_names_the_tensor_and_the_model(models: list[dict[str, Tensor]]) -> None:
    models[2]["cube"][1, 2, 3] = float("nan")
    plan, sources = make_plan(models, "task_arithmetic")
    with pytest.raises(InputError, match="m2: tensor 'cube' contains NaN"):
        merged(plan, sources)
    result = merged(plan, sources, settings=Arithmetic(allow_nan=True))
    assert int(result["cube"].isnan().sum()) == 1


def test_infinity_is_refused_and_large_values_are_not(models: list[dict[str, Tensor]]) -> None:
    for model in models:
        model["bias"][:] = 3e38
    assert torch.equal(merged(*make_plan(models, "linear"))["bias"], models[0]["bias"])
    models[1]["bias"][0] = float("-inf")
    with pytest.raises(InputError, match="m1: tensor 'bias' contains infinite values"):
        merged(*make_plan(models, "linear"))


def test_what_does_not_fit_the_output_dtype() -> None:
    models = [{"w": torch.full((4,), 1e6)} for _ in range(3)]
    plan, sources = make_plan(models, "linear")
    (output,) = plan.outputs
    narrow = replace(plan, outputs=(replace(output, spec=TensorSpec((4,), "float16")),))
    with pytest.raises(MerganserError, match="4 values do not fit float16"):
        merged(narrow, sources)


@pytest.mark.parametrize("processes", [False, True])
def test_what_does_not_fit_leaves_nothing_behind(tmp_path: Path, processes: bool) -> None:
    """The message asks for another dtype, and the merge with it starts afresh: there is nothing in its way."""
    for name in "ab":
        save_file({f"w{i}": torch.full((300, 300), 1e6) for i in range(8)}, tmp_path / f"{name}.safetensors")
    recipe: dict[str, Any] = {"method": "linear", "models": [str(tmp_path / f"{name}.safetensors") for name in "ab"]}
    with pytest.raises(InputError, match="values do not fit float16; choose an output dtype"):
        mg.run(recipe | {"output": {"dtype": "float16"}}, tmp_path / "out", workers=2, processes=processes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
    mg.run(recipe, tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (1e300, "float64", "float32"),
        (-1e300, "float64", "bfloat16"),
        (3.4e38, "float32", "bfloat16"),
        (-3.4e38, "float32", "bfloat16"),
        (-1e6, "bfloat16", "float16"),
        (1e4, "float32", "float8_e4m3fn"),
        (1e6, "float32", "float8_e5m2"),
    ],
)
def test_no_overflow_is_silent(value: float, source: str, target: str) -> None:
    tensor = torch.zeros(3, 5, dtype=getattr(torch, source))
    tensor[1, 2] = value
    with pytest.raises(MerganserError, match=f"'w': 1 values do not fit {target}; choose .* such as float"):
        mg.merge([{"w": tensor}, {"w": tensor.clone()}], dtype=target)
    allowed = mg.merge([{"w": tensor}, {"w": tensor.clone()}], dtype=target, allow_nan=True)["w"].float()
    assert allowed[1, 2].item() != value


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        ("float32", (2 - 2.0**-24) * 2.0**127),
        ("bfloat16", (2 - 2.0**-8) * 2.0**127),
        ("float16", 65520.0),
        ("float8_e4m3fn", 464.0),
        ("float8_e5m2", 61440.0),
    ],
)
def test_what_rounds_to_the_largest_value_fits(dtype: str, limit: float) -> None:
    wide = torch.float64 if dtype == "float32" else torch.float32
    beyond = torch.full((5000,), limit, dtype=wide)
    below = torch.nextafter(beyond, torch.zeros(5000, dtype=wide))
    merged = mg.merge([{"w": below}], dtype=dtype)["w"]
    assert torch.equal(merged.to(wide), torch.full_like(below, torch.finfo(getattr(torch, dtype)).max))
    with pytest.raises(MerganserError, match=f"5000 values do not fit {dtype}"):
        mg.merge([{"w": beyond}], dtype=dtype)


def test_infinities_that_are_copied_stay() -> None:
    mask = torch.tensor([0.0, -torch.inf])
    assert torch.equal(mg.merge([{"m": mask}], "passthrough", dtype="bfloat16")["m"].float(), mask)


COMPLEX = [{"w": torch.ones(2), "c": torch.full((2,), value)} for value in (1 + 1j, 3 + 5j)]


def test_complex_tensors_are_not_merged() -> None:
    with pytest.raises(InputError, match=r"'c' of .* complex64.* cannot be merged; to leave it out: output.exclude"):
        mg.merge(COMPLEX)
    with pytest.raises(InputError, match="'c' of .* complex64"):
        mg.merge([{"c": torch.ones(2)}, {"c": COMPLEX[1]["c"]}], dtype="bfloat16")
    with pytest.raises(InputError, match="'c' of .* complex64.*vectors are real; `exclude`"):
        mg.TaskVector(*COMPLEX)
    assert mg.TaskVector(*COMPLEX, exclude=["c"]).names() == ["w"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_complex_tensors_are_copied(dtype: str | None) -> None:
    copy = {"match": "c", "method": "passthrough", "model": "b"}
    merged = mg.merge({"a": COMPLEX[0], "b": COMPLEX[1]}, dtype=dtype, overrides=[copy])
    assert torch.equal(merged["c"], COMPLEX[1]["c"])
    with pytest.raises(InputError, match="'c' of b is complex64"):
        mg.merge({"a": COMPLEX[0], "b": COMPLEX[1]}, overrides=[copy | {"scale": 2.0}])


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("c", torch.complex128, "the format does not support complex128"),
        ("__metadata__", torch.float32, "reserves this name"),
    ],
)
def test_what_safetensors_cannot_hold(tmp_path: Path, name: str, dtype: torch.dtype, reason: str) -> None:
    torch.save({"w": torch.ones(2), name: torch.ones(2, dtype=dtype)}, tmp_path / "m.pt")
    recipe = {"method": "passthrough", "models": [{"path": str(tmp_path / "m.pt")}]}
    with pytest.raises(InputError, match=rf"'{name}' cannot be written .*{reason}.*output.exclude: \['{name}'\]"):
        mg.run(recipe, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"m.pt"}
    mg.run(recipe | {"output": {"exclude": [name]}}, tmp_path / "out")
    assert set(load_file(tmp_path / "out/model.safetensors")) == {"w"}


def test_progress_reaches_the_total(models: list[dict[str, Tensor]]) -> None:
    plan, sources = make_plan(models, "ties")
    seen: list[Progress] = []
    execute(Merge(plan, sources), DictSink(plan), workers=2, on_progress=seen.append)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total == plan.bytes_out
    assert {p.name for p in seen} == set(models[0])


def test_a_failing_worker_stops_the_work(models: list[dict[str, Tensor]]) -> None:
    class Broken(StateDict):
        def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
            raise OSError("the disk is gone")

    plan, sources = make_plan(models, "linear")
    with pytest.raises(OSError, match="the disk is gone"):
        merged(plan, [*sources[:2], Broken(models[2]), sources[3]])


@pytest.mark.parametrize("inner", ["linear", "ties", "model_stock"])
def test_a_nested_merge_equals_its_materialised_result(inner: str, models: list[dict[str, Tensor]]) -> None:
    plan, sources = make_plan(models, inner)
    view = Merged(Merge(plan, sources), "inner")
    eager = merged(plan, sources)
    for name, tensor in eager.items():
        assert torch.equal(view.read(name), tensor)
        assert view.spec(name).shape == tuple(tensor.shape)
    assert torch.equal(view.read("big", (100, 333)), eager["big"][100:333])
    outer, _ = make_plan([models[0], eager, models[1]], "task_arithmetic")
    lazily = merged(outer, [sources[0], view, sources[1]])  # type: ignore[list-item]
    assert same(lazily, merged(outer, [StateDict(m) for m in (models[0], eager, models[1])]))


def test_the_memory_bound_is_the_budget_or_one_tensor(models: list[dict[str, Tensor]]) -> None:
    plan, sources = make_plan(models, "linear")
    assert memory_bound(Merge(plan, sources), 2, 1) > 4 * models[0]["big"].numel()
    assert memory_bound(Merge(plan, sources), 64, 10**7) <= 2 * 10**7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shard_size", [10**9, 500_000, 1])
def test_the_writer_writes_what_safetensors_reads(tmp_path: Path, dtype: torch.dtype, shard_size: int) -> None:
    models = random_models(2, dtype=dtype)
    plan, sources = make_plan(models, "linear", shard_size=shard_size)
    writer = CheckpointWriter(Destination(tmp_path / "out"), plan, "x")
    execute(Merge(plan, sources), writer)
    writer.publish(lambda directory: None)
    found: dict[str, Tensor] = {}
    for shard in lay_out(plan):
        found |= load_file(tmp_path / "out" / shard.file)
    assert same(found, merged(plan, sources))
    assert not (tmp_path / "out.partial").exists()


def test_two_runs_write_the_same_bytes(tmp_path: Path, models: list[dict[str, Tensor]]) -> None:
    digests = set()
    for number, workers in enumerate((1, 4)):
        plan, sources = make_plan(models, "dare_ties")
        writer = CheckpointWriter(Destination(tmp_path / str(number)), plan, "x")
        execute(Merge(plan, sources), writer, workers=workers)
        path = writer.publish(lambda directory: None)
        digests.add(hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1
