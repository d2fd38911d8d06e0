"""Every checkpoint and every view of one is a mapping from names to tensors."""

import copy
import pickle
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import merganser as mg
from merganser.errors import CheckpointError, MissingTensorError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def saved(tmp_path):
    """A module with tied weights, and the directory it was saved to."""
    module = Tied()
    return module, mg.save(module, tmp_path / "saved")


def views(module, path):
    base = mg.open(path)
    other = mg.save({name: tensor + 1 for name, tensor in module.state_dict().items()}, path.parent / "other")
    vector = mg.TaskVector(other, path)
    return {
        "module": mg.open(module),
        "state dict": mg.open(module.state_dict()),
        "directory": base,
        "file": mg.open(path / "model.safetensors"),
        "expression": vector.apply_to(base),
        "task vector": vector,
    }


@pytest.mark.parametrize("kind", ["module", "state dict", "directory", "file", "expression", "task vector"])
def test_a_checkpoint_behaves_as_a_mapping(saved, kind):
    view = views(*saved)[kind]
    assert isinstance(view, Mapping)
    assert len(view) == len(list(view)) == len(set(view)) == len(dict(view))
    assert {*view.names(), *view.aliases()} == set(view)
    for name, tensor in view.items():
        assert name in view
        assert torch.equal(view[name], tensor)
        assert torch.equal(view.read(view.aliases().get(name, name)), tensor)
    assert "nothing" not in view
    assert view.get("nothing") is None
    assert 3 not in view


@pytest.mark.parametrize("kind", ["module", "state dict", "directory", "file", "expression", "task vector"])
def test_a_checkpoint_can_be_copied_and_sent_to_another_process(saved, kind):
    view = views(*saved)[kind]
    for other in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert other.label == view.label
        assert all(torch.equal(other[name], tensor) for name, tensor in view.items())


def test_tied_names_are_keys_and_load_into_the_module(saved):
    module, path = saved
    opened = mg.open(path)
    assert set(opened) == set(module.state_dict()) > set(opened.names())
    fresh = Tied()
    assert fresh.load_state_dict(opened) is not None
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in fresh.state_dict().items())
    assert fresh.head.weight is fresh.embed.weight


def test_an_expression_loads_into_a_module(saved):
    module, path = saved
    moved = mg.TaskVector({name: 2 * tensor for name, tensor in module.state_dict().items()}, path).apply_to(path)
    fresh = Tied()
    fresh.load_state_dict(moved)
    torch.testing.assert_close(fresh.body.weight, 2 * module.body.weight)
    torch.testing.assert_close(moved["body.weight"], 2 * module.body.weight.detach())


def test_a_missing_name_is_both_a_key_error_and_ours(saved):
    opened = mg.open(saved[1])
    with pytest.raises(KeyError) as caught:
        opened["body.wieght"]
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, MissingTensorError)
    assert str(caught.value).endswith("has no tensor 'body.wieght'; did you mean 'body.weight'?")


def test_equality_is_identity_and_checkpoints_are_hashable(saved):
    one, two = mg.open(saved[1]), mg.open(saved[1])
    assert one == one
    assert one != two
    assert len({one, two, one}) == 2


def test_the_repr_says_how_much_there_is(saved):
    shown = repr(mg.open(saved[1]))
    assert shown.startswith("<")
    assert str(saved[1]) in shown
    assert "3 tensors, 27 parameters, float32" in shown
