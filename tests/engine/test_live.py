"""A live module after many loads holds what each recipe would write."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import merganser as mg
from merganser.engine.live import LiveModule
from merganser.errors import InputError
from merganser.methods.sparsify import Band, RankedDrop


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    base = Net().state_dict()
    save_file(base, tmp_path / "base.safetensors")
    for name in ("a", "b"):
        tuned = {n: t if "embed" in n else t + 0.1 * torch.randn_like(t) for n, t in base.items()}
        save_file(tuned, tmp_path / f"{name}.safetensors")
    return tmp_path


def recipe(folder, a=0.5, b=0.5, **parameters):
    models = [
        {"path": str(folder / "a.safetensors"), "weight": a},
        {"path": str(folder / "b.safetensors"), "weight": b},
    ]
    return {"method": "ties", "base": str(folder / "base.safetensors"), "models": models, "parameters": parameters}


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_every_load_holds_what_the_recipe_merges(folder, scope):
    opened = {}
    live = LiveModule(Net())
    loads = [(0.5, 0.5, 0.5), ([0.2, 0.5], 0.5, 0.5), ([0.2, 0.5], 0.5, {"layers.0*": 0.9, "*": 0.5}), (0.5, 0.5, 0.2)]
    for a, b, density in loads:
        document = recipe(folder, a, b, density=density, scope=scope)
        merge = mg.recipes.prepare(mg.recipes.load(document), lambda r: opened.setdefault(r, mg.open(r)))
        live.load(merge)
        mg.run(document, folder / "out", overwrite=True)
        for name, tensor in mg.open(folder / "out").state_dict().items():
            assert torch.equal(live.module.state_dict()[name], tensor), (density, name)


def test_only_what_changed_is_computed(folder):
    opened = {}
    live = LiveModule(Net())

    def load(**values):
        merge = mg.recipes.prepare(
            mg.recipes.load(recipe(folder, **values)), lambda r: opened.setdefault(r, mg.open(r))
        )
        return {output.name for output in live.load(merge)}

    assert len(load(density=0.5)) == 7
    assert load(density=0.5) == set()
    assert load(density={"layers.1*": 0.1, "*": 0.5}) == {"layers.1.weight", "layers.1.bias"}
    assert "embed.weight" not in load(a=0.9, density=0.5), "no model touches it"


def test_thresholds_are_kept_while_weights_move(folder, monkeypatch):
    surveyed = []
    survey = Band.survey
    monkeypatch.setattr(Band, "survey", lambda self, blocks: surveyed.append(blocks) or survey(self, blocks))
    opened = {}
    live = LiveModule(Net())

    def load(**values):
        surveyed.clear()
        merge = mg.recipes.prepare(
            mg.recipes.load(recipe(folder, **values)), lambda r: opened.setdefault(r, mg.open(r))
        )
        return len(live.load(merge)), len(surveyed)

    assert load(density=0.5) == (7, 7)
    assert load(a=0.9, density=0.5) == (6, 0)
    assert load(a=0.9, density=0.2) == (6, 6)
    assert load(a=0.9, density=0.2, scale=0.7) == (6, 0)
    assert load(a=0.9, density=0.2, norms="equal") == (7, 7), "the gains depend on other tensors"


def test_a_nested_recipe_is_refused(folder):
    document = recipe(folder)
    document["models"][0] = {"recipe": {"method": "linear", "models": [str(folder / "a.safetensors")]}}
    with pytest.raises(InputError, match="nested recipe cannot be merged in memory"):
        LiveModule(Net()).load(mg.recipes.prepare(mg.recipes.load(document)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["task_arithmetic", "linear", "ties", "dare_ties"])
def test_a_float32_module_holds_the_rounded_weights_of_the_output(tmp_path, dtype, method):
    """Compiled into the parameters, over several spans and tensors that share a rule."""
    torch.manual_seed(0)
    shapes = {"first": (300, 200), "second": (300, 200), "third": (3000, 1600), "norm": (9,)}
    base = {name: torch.randn(shape) for name, shape in shapes.items()}
    for name in ("base", "a", "b"):
        tuned = {n: (t + 0.1 * (name != "base") * torch.randn_like(t)).to(dtype) for n, t in base.items()}
        save_file(tuned, tmp_path / f"{name}.safetensors")
    document = recipe(tmp_path, 0.3, 0.9) | {"method": method}
    if method == "linear":
        del document["base"]
    module = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()}).requires_grad_(False)
    LiveModule(module).load(mg.recipes.prepare(mg.recipes.load(document)))
    mg.run(document, tmp_path / "out")
    for name, tensor in mg.open(tmp_path / "out").state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(module[name], tensor.float()), name


def made_of_matrices(folder, dtype=torch.bfloat16):
    """A module, and the files of a base and two models of its shapes."""
    torch.manual_seed(0)
    shapes = {"first": (300, 200), "third": (3000, 1600), "stack": (2, 300, 500), "norm": (9,)}
    base = {name: torch.randn(shape) for name, shape in shapes.items()}
    for name in ("base", "a", "b"):
        tuned = {n: (t + 0.1 * (name != "base") * torch.randn_like(t)).to(dtype) for n, t in base.items()}
        save_file(tuned, folder / f"{name}.safetensors")
    return nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()}).requires_grad_(False)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "della", "della_linear", "ties", "breadcrumbs"])
@pytest.mark.parametrize("room", [0, 3 << 20, 1 << 30])
def test_thinned_task_vectors_are_kept_while_weights_move(tmp_path, method, room):
    """However much room there is, every load holds what the recipe merges."""
    module, opened = made_of_matrices(tmp_path), {}
    live = LiveModule(module, room=room)
    for a, density in ((0.3, 0.5), (-0.8, 0.5), (0.7, 0.4)):
        document = recipe(tmp_path, a, 0.9, density=density) | {"method": method}
        live.load(mg.recipes.prepare(mg.recipes.load(document), lambda r: opened.setdefault(r, mg.open(r))))
        assert live.held <= room
        assert room < 1 << 30 or live.held == 8 * (300 * 200 + 3000 * 1600 + 2 * 300 * 500)
        for name, tensor in mg.merge(
            [mg.open(m["path"]) for m in document["models"]],
            method=method, base=mg.open(document["base"]), weight=[a, 0.9], density=density,
        ).items():  # fmt: skip
            assert torch.equal(module[name], tensor.float()), (name, a)


def test_the_second_load_draws_nothing(tmp_path, monkeypatch):
    module, opened, thinned = made_of_matrices(tmp_path), {}, []
    live = LiveModule(module, room=1 << 30)
    thin_ = RankedDrop.thin_
    monkeypatch.setattr(RankedDrop, "thin_", lambda self, *given: thinned.append(given[1].name) or thin_(self, *given))

    def load(method="della", a=0.5, **values):
        thinned.clear()
        document = recipe(tmp_path, a, **values) | {"method": method}
        live.load(mg.recipes.prepare(mg.recipes.load(document), lambda r: opened.setdefault(r, mg.open(r))))
        return {*thinned}

    small = {"norm"}  # not worth keeping
    assert load(density=0.5) == {"first", "third", "stack", "norm"}
    assert load(a=0.9, density=0.5) == small
    assert load(a=0.9, density=0.5, scale=0.5) == small
    assert load("della_linear", density=0.5) == small, "the same draws"
    assert load(density=0.4) == {"first", "third", "stack", "norm"}
    load("task_arithmetic")
    assert live.held == 0, "memory is given back when the rule drops nothing"
