from types import SimpleNamespace

import pytest
import torch

import merganser as mg
from merganser.checkpoints.dtypes import FLOATS, Element, dtype_of
from merganser.errors import CheckpointError, InputError


@pytest.mark.parametrize("name", FLOATS)
def test_names_and_dtypes_mean_the_same(name: str) -> None:
    assert dtype_of(name) is dtype_of(f"torch.{name}") is dtype_of(getattr(torch, name))
    assert Element.of(dtype_of(name)).name == name


def test_short_names_and_what_else_is_known() -> None:
    assert dtype_of("bf16") is torch.bfloat16
    assert dtype_of("fp16") is dtype_of("half") is torch.float16
    assert dtype_of("int8", ("int8",)) is torch.int8


def test_others_are_refused() -> None:
    with pytest.raises(InputError, match="'flot16' is not a dtype of weights; did you mean 'float16'"):
        dtype_of("flot16")
    with pytest.raises(InputError, match="'int64' is not a dtype of adapters; known: float16"):
        dtype_of(torch.int64, ("float16",), "adapters")
    with pytest.raises(InputError, match="expected a name such as 'bfloat16' or a torch.dtype, got 16"):
        dtype_of(16)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", torch.bfloat16])
def test_whoever_takes_a_dtype_takes_both(tmp_path, dtype) -> None:
    base, tuned = {"w": torch.zeros(3, 2)}, {"w": torch.ones(3, 2)}
    assert mg.merge([base, tuned], dtype=dtype)["w"].dtype == torch.bfloat16
    vector = mg.TaskVector(tuned, base)
    mg.save(vector, tmp_path / "vector", dtype=dtype)
    mg.save(vector.apply_to(base), tmp_path / "model", dtype=dtype)
    for name in ("vector", "model"):
        assert mg.open(tmp_path / name).spec("w").dtype == torch.bfloat16
    with pytest.raises(InputError, match="not a dtype of weights"):
        mg.save(vector, tmp_path / "other", dtype=torch.int8)
    with pytest.raises(InputError, match="not a dtype of weights"):
        mg.merge([base, tuned], dtype="int8")


def test_dtypes_that_this_torch_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(__version__="2.6.0", dtype=torch.dtype)
    monkeypatch.setattr("merganser.checkpoints.dtypes.torch", old)
    with pytest.raises(CheckpointError, match=r"has no dtype 'float8_e8m0fnu'; install a newer torch"):
        Element.of("float8_e8m0fnu").dtype  # noqa: B018
    with pytest.raises(CheckpointError, match="'float3' is not a dtype"):
        Element.of("float3")


TORCH = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_elements_know_what_torch_knows(dtype: torch.dtype) -> None:
    element = Element.of(dtype)
    assert element.dtype is dtype
    assert element is Element.of(str(dtype))
    for fact in ("itemsize", "is_floating_point", "is_complex"):
        assert getattr(element, fact) == getattr(dtype, fact)
