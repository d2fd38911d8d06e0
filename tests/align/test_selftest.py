"""A wrong symmetry never passes its test, however harmless fresh weights make it look."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from merganser.align import Symmetry, symmetry
from merganser.align.selftest import cycles, self_test
from merganser.align.symmetries import Atom, Factor, product
from merganser.errors import InputError, MerganserError

X = torch.randn(4, 3)


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)
    ).eval()


def pinned_at(found: Symmetry, name: str, dim: int) -> Symmetry:
    """The mistake of forgetting one axis."""
    axes = list(found.axes[name])
    axes[dim] = product(Factor(None, found.tensor_shape(name)[dim]))
    return replace(found, axes={**found.axes, name: tuple(axes)})


def test_every_forgotten_axis_is_found(net: nn.Module) -> None:
    found = symmetry(net, X)
    assert self_test(net, found, X).difference < 1e-12
    places = [place for atom in found.atoms for place in found.occurrences[atom]]
    assert len(places) == 7 + 3
    for name, dim in places:
        with pytest.raises(MerganserError, match="failed its self-test"):
            self_test(net, pinned_at(found, name, dim), X)


def test_the_guilty_atom_is_named(net: nn.Module) -> None:
    wrong = pinned_at(symmetry(net, X), "1.running_var", 0)
    with pytest.raises(MerganserError, match=r"when permuting 0;"):
        self_test(net, wrong, X)


def test_no_unit_stays_in_place() -> None:
    atoms = {"a": Atom("a", 2), "b": Atom("b", 3, "a"), "c": Atom("c", 7)}
    for seed in range(20):
        for name, permutation in cycles(Symmetry(atoms, {}), seed).items():
            assert (permutation != torch.arange(atoms[name].size).numpy()).all()


def test_permuting_outputs_is_wrong(net: nn.Module) -> None:
    wrong = Symmetry(
        {"out": Atom("out", 2)},
        {name: tuple(product(Factor(None, n)) for n in tensor.shape) for name, tensor in net.state_dict().items()},
    ).extend(axes={"5.bias": [product(Factor("out", 2))]})
    with pytest.raises(MerganserError, match="when permuting out"):
        self_test(net, wrong, X)


def test_parts_computed_in_float32_do_not_blur_the_test() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sinh(x.float()).to(x.dtype)

    net = nn.Sequential(nn.Linear(3, 64), Narrow(), nn.Linear(64, 2)).eval()
    assert self_test(net, symmetry(net, X), X).difference < 1e-12


def test_inconclusive_and_impossible_tests_say_so() -> None:
    class Overflow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0

    class OnlySingle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                raise TypeError("single precision only")
            return x

    for layer, message in ((Overflow(), "inconclusive"), (OnlySingle(), "single precision only")):
        with pytest.raises(InputError, match=message):
            symmetry(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2)), X)


def test_a_test_that_compares_nothing_does_not_pass(net: nn.Module) -> None:
    with pytest.raises(InputError, match="no outputs to compare"):
        self_test(net, symmetry(net, X), (X[:0],))


def test_the_module_keeps_its_modes() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    net[1].eval()
    self_test(net, symmetry(net, X[:, :2]), X[:, :2])
    assert net.training
    assert net[0].training
    assert not net[1].training
