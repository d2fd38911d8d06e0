"""Live merges equal what the engine writes, whatever was loaded before; only changed tensors are computed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

import merganser as mg
from merganser.engine import execute as execute_module
from merganser.engine import live as live_module
from merganser.errors import InputError, MerganserError
from merganser.evolve.fitness import LiveMerge, MergedModels
from merganser.evolve.space import SearchParameter, Space
from merganser.methods import registry as methods


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(self.embed(x).mean(1))))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    base = Net().state_dict()
    for name in ("base", "math", "code"):
        state = {k: v.clone() for k, v in base.items()}
        if name != "base":
            for key, value in state.items():
                if value.is_floating_point() and not key.startswith("embed"):
                    value += 0.1 * torch.randn_like(value)
        save_file(state, tmp_path / f"{name}.safetensors")
    return tmp_path


def template(folder, method="ties", **parameters):
    return {
        "method": method,
        "base": str(folder / "base.safetensors"),
        "models": [{"path": str(folder / f"{name}.safetensors")} for name in ("math", "code")],
        "parameters": parameters,
    }


SPACE = Space(
    {
        "weight": SearchParameter(0, 2, per="model"),
        "density": SearchParameter(0.1, 1, groups={"first": "first*", "rest": "*"}),
    },
    models=("math", "code"),
)


def written(document, out):
    mg.run(document, out)
    return mg.open(out).state_dict()


def test_every_load_equals_the_checkpoint_the_recipe_writes(folder):
    live = LiveMerge(Net(), template(folder), SPACE)
    rng = np.random.default_rng(0)
    candidates = [SPACE.decode(g) for g in rng.random((3, len(SPACE.variables)))]
    for number, candidate in enumerate([candidates[0], "math", *candidates, "code", candidates[0]]):
        module = live.load(candidate)
        expected = written(live.document(candidate), folder / f"out{number}")
        state = module.state_dict()
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), (number, name)


def test_a_candidate_is_never_written_as_text(folder, monkeypatch):
    monkeypatch.setattr(yaml, "safe_dump", None)
    monkeypatch.setattr(yaml, "load_all", None)
    live = LiveMerge(Net(), template(folder), SPACE)
    for candidate in (SPACE.decode(np.full(len(SPACE.variables), 0.4)), "math"):
        live.load(candidate)


def test_only_changed_tensors_are_computed(folder, monkeypatch):
    computed = []
    original = execute_module.execute

    def spy(merge, sink, **kwargs):
        computed.append({output.name for output in merge.plan.outputs} - set(sink.done()))
        original(merge, sink, **kwargs)

    monkeypatch.setattr(live_module, "execute", spy)
    live = LiveMerge(Net(), template(folder), SPACE)
    values = SPACE.decode(np.full(len(SPACE.variables), 0.5))
    live.load(values)
    assert "embed.weight" in computed[0]
    live.load(values)
    assert len(computed) == 1
    live.load(values | {"density.first": 0.2})
    assert computed[-1] == {"first.weight", "first.bias"}
    live.load(values | {"weight.math": 1.9})
    assert "embed.weight" not in computed[-1], "no model touches the embedding"
    assert "last.weight" in computed[-1]


@pytest.mark.parametrize("name", sorted(n for n, m in methods.registry().items() if m.base == "required"))
def test_rules_on_deltas_leave_untouched_tensors_alone(name):
    """What lets a live merge skip tensors that no model touches."""
    rule = methods.lookup(name)
    if rule.statistics or any(p.required for p in methods.parameters(rule).values()):
        pytest.skip("needs more than models")
    state = {"a": torch.randn(6, 5, generator=torch.Generator().manual_seed(0))}
    count = max(2, rule.models[0]) if rule.models[1] >= 2 else 1
    merged = mg.merge([dict(state) for _ in range(count)], method=name, base=state)
    assert torch.equal(merged["a"], state["a"])


class Quiz:
    """Twenty inputs whose right answer is what the mean of both models says."""

    def __len__(self):
        return 20

    def __call__(self, model, items):
        x = torch.arange(60).view(20, 3)[list(items)] % 11
        logits = model(x)
        return {"score": (logits.argmax(1) == x[:, 0] % 3).float().tolist(), "size": logits.abs().mean(1).tolist()}


def test_the_evaluator_of_a_study(folder):
    evaluate = MergedModels(Net, template(folder), SPACE, {"quiz": Quiz()})
    values = SPACE.decode(np.full(len(SPACE.variables), 0.5))
    answers = evaluate(values, {"quiz": [3, 5]})
    assert set(answers) == {"quiz", "quiz.size"}
    assert len(answers["quiz"]) == 2
    import pickle

    again = pickle.loads(pickle.dumps(MergedModels(Net, template(folder), SPACE, {"quiz": Quiz()})))
    assert again(values, {"quiz": [3, 5]}) == answers
    module = evaluate.live.module
    assert not module.training


def test_a_method_under_search(folder):
    method = SearchParameter(choices=("ties", "task_arithmetic"))
    space = Space({"method": method, "weight": SPACE.parameters["weight"]}, models=SPACE.models)
    live = LiveMerge(Net(), template(folder), space)
    for method in ("ties", "task_arithmetic"):
        values = {"method": method, "weight.math": 0.5, "weight.code": 0.7}
        expected = written(live.document(values), folder / method)
        assert torch.equal(live.load(values).state_dict()["first.weight"], expected["first.weight"])


def test_a_scale_under_search_reaches_tensors_that_no_model_touches(folder):
    """A scaled copy of the base's tensor is not the base's tensor: it is computed whenever the scale changes."""
    recipe = {**template(folder), "method": "passthrough"}
    recipe = {**recipe, "models": recipe["models"][:1], "parameters": {}}
    live = LiveMerge(Net(), recipe, Space({"scale": SearchParameter(0, 2)}, models=("math",)))
    for number, candidate in enumerate([{"scale": 0.5}, {"scale": 1.5}, "math", {"scale": 0.5}, {"scale": 1.0}]):
        state = live.load(candidate).state_dict()
        expected = written(live.document(candidate), folder / f"out{number}")
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items()), number


def test_an_embedding_taken_for_a_head_is_not_the_head(tmp_path):
    """A model tied in its file gives its embedding for the base's head: its task vector there is not zero."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(5, 4, generator=generator) for _ in range(2))
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": head}, tmp_path / "base.safetensors")
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "tied.safetensors")

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Module()
            self.model.embed_tokens = nn.Embedding(5, 4)
            self.lm_head = nn.Linear(4, 5, bias=False)

    recipe = {
        "method": "task_arithmetic",
        "base": str(tmp_path / "base.safetensors"),
        "models": [{"path": str(tmp_path / "tied.safetensors")}],
    }
    live = LiveMerge(Head(), recipe, Space({"weight": SearchParameter(0, 1, per="model")}, models=("tied",)))
    for weight in (0.25, 0.75):
        expected = written(live.document({"weight.tied": weight}), tmp_path / f"out{weight}")
        state = live.load({"weight.tied": weight}).state_dict()
        assert torch.equal(state["lm_head.weight"], expected["lm_head.weight"]), weight


def test_a_module_of_another_shape_is_refused(folder):
    class Wider(Net):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 4)
            self.extra = nn.Linear(2, 2)

    values = SPACE.decode(np.full(len(SPACE.variables), 0.5))
    with pytest.raises(InputError, match="last.weight"):
        LiveMerge(Wider(), template(folder), SPACE).load(values)

    class More(Net):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(2, 2)

    with pytest.raises(InputError, match=r"no tensor for the module's 'extra\.weight'"):
        LiveMerge(More(), template(folder), SPACE).load(values)
    with pytest.raises(InputError, match="no endpoint 'maths'"):
        LiveMerge(Net(), template(folder), SPACE).load("maths")


def test_an_endpoint_with_nan_is_refused(folder):
    weight = torch.full((2, 2), torch.nan)
    save_file({**Net().state_dict(), "last.weight": weight}, folder / "broken.safetensors")
    recipe = template(folder)
    recipe["models"][0]["path"] = str(folder / "broken.safetensors")
    with pytest.raises(InputError, match=r"broken.*'last.weight' contains NaN"):
        LiveMerge(Net(), recipe, SPACE).load("math")


def test_a_merge_that_overflows_its_dtype_is_refused(folder):
    recipe = {**template(folder, scale=1e7), "output": {"dtype": "float16"}}
    with pytest.raises(MerganserError, match="do not fit float16"):
        LiveMerge(Net(), recipe, SPACE).load(SPACE.decode(np.full(len(SPACE.variables), 0.5)))


def test_endpoints_take_the_vocabulary_of_the_merge(tmp_path):
    """An endpoint with more tokens than the base is seen through the base's vocabulary, as in every candidate."""
    folders = {}
    for name, rows in (("base", 5), ("wide", 7), ("plain", 5)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        generator = torch.Generator().manual_seed(rows)
        tensors = {
            "model.embed_tokens.weight": torch.randn(rows, 4, generator=generator),
            "lm_head.weight": torch.randn(rows, 4, generator=generator),
        }
        save_file(tensors, folders[name] / "model.safetensors")
        (folders[name] / "config.json").write_text(json.dumps({"vocab_size": rows}))
        vocabulary = {f"t{i}": i for i in range(rows)}
        (folders[name] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Module()
            self.model.embed_tokens = nn.Embedding(5, 4)
            self.lm_head = nn.Linear(4, 5, bias=False)

    space = Space({"weight": SearchParameter(0, 1, per="model")}, models=("wide", "plain"))
    document = {
        "method": "task_arithmetic",
        "base": str(folders["base"]),
        "models": [{"path": str(folders["wide"])}, {"path": str(folders["plain"])}],
        "output": {"tokenizer": "base"},
    }
    live = LiveMerge(Head(), document, space)
    own = mg.open(folders["wide"]).state_dict()
    state = live.load("wide").state_dict()
    assert all(torch.equal(state[name], tensor[:5]) for name, tensor in own.items())
    live.load({"weight.wide": 0.5, "weight.plain": 0.5})
    state = live.load("wide").state_dict()
    assert all(torch.equal(state[name], tensor[:5]) for name, tensor in own.items())
