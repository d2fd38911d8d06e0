"""A self-test leaves no trace in the module, knows when it proves nothing, and runs what float64 makes difficult."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merganser.align import match, scramble, self_test, symmetry, universe
from merganser.align.double_precision import call_in_double
from merganser.align.symmetries import Factor, product
from merganser.errors import InputError, MerganserError

X = torch.randn(4, 3)
TOKENS = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(0))


class Caching(nn.Module):
    """Keeps what it computes from a weight until it is trained again, as LeViT and TinyViT do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.gain = nn.Parameter(torch.randn(6))
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Caching:
        if mode:
            self.cache = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if "gain" not in self.cache:
            self.cache["gain"] = self.gain.exp()
        return self.last(torch.relu(self.first(x)) * self.cache["gain"])


@pytest.mark.parametrize("warm", [False, True])
def test_caches_of_the_forward_pass_are_left_alone(warm: bool) -> None:
    net = Caching().eval()
    before = net(X).detach() if warm else None
    kept = dict(net.cache)
    found = symmetry(net, X)
    assert found.free("gain") == found.free("first.bias") != set()
    assert self_test(net, found, X).verdict == "passed"
    assert net.cache == kept
    after = net(X).detach()
    assert after.dtype == torch.float32
    assert before is None or torch.equal(before, after)


def test_testing_in_inference_mode() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.inference_mode():
        assert symmetry(net, X).free("0.bias")


def test_weights_and_random_state_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    symmetry(net, X)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_is_copied() -> None:
    """Its weight is the result of differentiable code, which deepcopy refuses."""
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 6)), nn.ReLU(), nn.Linear(6, 2))
    net(X).sum().backward()
    symmetry(net, X, self_test=False)


def test_one_float64_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything after the draw works on the same memory."""
    from merganser.align import selftest

    seen: list[set[int]] = []
    call = selftest.call_in_double

    def spy(module: nn.Module, weights: dict[str, Tensor], example: Any) -> Any:
        seen.append({tensor.data_ptr() for tensor in weights.values()})
        return call(module, weights, example)

    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    monkeypatch.setattr(selftest, "call_in_double", spy)
    symmetry(net, X)
    assert len(seen) >= 3
    assert all(addresses == seen[0] for addresses in seen)


class Stochastic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(len(x), 1)


def test_random_numbers_of_the_forward_pass_are_the_same_every_time() -> None:
    net = nn.Sequential(Stochastic(), nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    assert self_test(net, symmetry(net, X), X).verdict == "passed"


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        assert torch.zeros(1).dtype == torch.float64
        return x


def test_threads_that_test_at_once_leave_the_default_dtype_as_it_was() -> None:
    """It is one for all threads: the second would restore what the first had set."""

    def run(delay: float) -> None:
        time.sleep(delay)
        call_in_double(Slow(), {}, ((X,), {}))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, (0.0, 0.02, 0.03)))
    assert torch.get_default_dtype() == torch.float32


class Ignores(nn.Module):
    """A network with a dead end: nothing of the input arrives."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x * 0 if self.where == "input" else x).relu()
        hidden = self.middle(hidden * 0 if self.where == "first" else hidden).relu()
        return self.last(hidden * 0 if self.where == "middle" else hidden)


def test_outputs_that_ignore_the_inputs_prove_nothing() -> None:
    for where, message in (("input", "the inputs"), ("middle", "the weights that move")):
        net = Ignores(where)
        with pytest.raises(InputError, match=f"inconclusive: its outputs do not depend on {message}"):
            symmetry(net, X)
        found = symmetry(net, X, self_test=False)
        result = self_test(net, found, X)
        assert result.verdict == "inconclusive"
        assert result.ignores_inputs
    assert result.untested == ("first", "middle")
    embedded = nn.Sequential(nn.Embedding(40, 3), Ignores("input"))
    with pytest.raises(InputError, match="inconclusive"):
        symmetry(embedded, TOKENS)


class Branches(nn.Module):
    """Two experts, of which an example uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
        self.two = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gate * self.one(x) + (1 - gate) * self.two(x)


def test_atoms_that_no_example_tests_are_named(caplog: pytest.LogCaptureFixture) -> None:
    net = Branches()
    off, on = torch.zeros(()), torch.ones(())
    with caplog.at_level(logging.WARNING):
        found = symmetry(net, (X, on))
    assert "inconclusive for two.0:" in caplog.text
    result = self_test(net, found, (X, on))
    assert result.verdict == "inconclusive"
    assert result.untested == ("two.0",)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        symmetry(net, (X, on), more_examples=[(X, off)])
    assert not caplog.text


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 3, dtype=dtype))
        self.last = nn.Parameter(torch.randn(2, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x.to(self.first.dtype) @ self.first.T)
        return hidden @ self.last.T


def test_complex_weights_are_tested_matched_and_averaged() -> None:
    torch.manual_seed(0)
    net, other = Complex(), Complex()
    found = symmetry(net, X)
    assert list(found.atoms) == ["first"]
    assert self_test(net, found, X).verdict == "passed"
    twin = scramble(net, found, seed=4)
    back = match(net, twin, found).apply(twin)
    assert all(torch.equal(back[name], tensor) for name, tensor in net.state_dict().items())
    aligned = universe([net, other], found)
    merged = aligned.merged()
    expected = (aligned.to_universe(0)["first"] + aligned.to_universe(1)["first"]) / 2
    assert torch.allclose(merged["first"], expected)


def test_a_wrong_symmetry_of_complex_weights_fails() -> None:
    net = Complex()
    found = symmetry(net, X)
    wrong = found.extend(axes={"last": [found.axes["last"][0], product(Factor(None, 8))]})
    with pytest.raises(MerganserError, match="failed its self-test"):
        self_test(net, wrong, X)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden * 2 if hidden.sum() > 0 else hidden)


def test_the_graph_of_torch_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="cannot trace Branching"):
        symmetry(Branching(), X)
    shown = capfd.readouterr()
    assert shown.err == shown.out == ""
    assert logging.root.manager.disable == logging.NOTSET


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers")


def test_experts_of_transformers(transformers: ModuleType) -> None:
    config = transformers.MixtralConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    net = transformers.MixtralForCausalLM(config).eval()
    implementation = net.config._experts_implementation
    found = symmetry(net, TOKENS)
    assert all(found.free(name) for name in found.axes)
    assert net.config._experts_implementation == implementation
    assert net.config.use_cache


def test_rwkv_is_tested_as_it_was_derived(transformers: ModuleType) -> None:
    config = transformers.RwkvConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16, intermediate_size=24
    )
    net = transformers.RwkvForCausalLM(config).eval()
    found = symmetry(net, TOKENS[:, :4])
    assert self_test(net, found, TOKENS[:, :4]).verdict == "passed"
