"""Experts merged one by one, against the method that is given all of them."""

import pytest
import torch

import merganser as mg
from merganser.errors import CheckpointError


def models(count=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (12, 9), "b.weight": (7, 15), "norm": (6,)}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    experts = [
        {name: value + 0.1 * (i + 1) * torch.randn(value.shape, generator=generator) for name, value in base.items()}
        for i in range(count)
    ]
    return base, experts


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_one_by_one_is_all_at_once(tmp_path):
    base, experts = models()
    line = mg.tuning.Continual(base)
    for count, expert in enumerate(experts, start=1):
        line.add(expert)
        assert line.count == count
        close(line.weights(), mg.merge(experts[:count], "opcm", base))


def test_a_saved_merge_goes_on(tmp_path):
    base, experts = models()
    line = mg.tuning.Continual(base)
    for expert in experts[:3]:
        line.add(expert)
    line.save(tmp_path / "three")
    later = mg.tuning.Continual.load(tmp_path / "three", base)
    assert later.gain == pytest.approx(line.gain, rel=1e-5)
    later.add(experts[3])
    wanted = mg.merge(experts, "opcm", base)
    close(later.weights(), wanted)
    # The same from the method itself, given the two numbers of the state.
    held = {"merged": 3, "gain": line.gain}
    close(mg.merge([str(tmp_path / "three"), experts[3]], "opcm", base, **held), wanted)


def test_what_is_no_continual_merge_is_refused(tmp_path):
    base, experts = models(1)
    mg.save(experts[0], tmp_path / "plain")
    with pytest.raises(CheckpointError, match="no state of a continual merge"):
        mg.tuning.Continual.load(tmp_path / "plain", base)


def test_a_saved_merge_does_not_go_on_from_another_base(tmp_path):
    base, experts = models(2)
    line = mg.tuning.Continual(base)
    line.add(experts[0])
    line.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match="give the base it was made with"):
        mg.tuning.Continual.load(tmp_path / "one", experts[1])


def test_an_expert_that_is_not_finite_is_refused():
    base, experts = models(2)
    line = mg.tuning.Continual(base)
    line.add(experts[0])
    before = line.weights()
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        line.add({**experts[1], "norm": torch.full((6,), float("nan"))})
    assert line.count == 1
    close(line.weights(), before)


def test_an_expert_that_did_not_move_changes_only_the_mean_norm():
    base, experts = models(1)
    line = mg.tuning.Continual(base)
    line.add(base)
    close(line.weights(), base)
    line.add(experts[0])
    close(line.weights(), {name: (base[name] + experts[0][name]) / 2 for name in base})
