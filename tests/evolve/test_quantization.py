"""Quantised copies follow the live module tensor by tensor; studies test in full precision and report the bias."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from merganser.cli.evolve import app
from merganser.errors import InputError
from merganser.evolve import Design, Objective, Search, SearchParameter, Study, StudyTask
from merganser.evolve.loading import load, parse
from merganser.evolve.metering import CostMeter
from merganser.evolve.quantization import Quantization, QuantizedCopy
from merganser.evolve.summary import quantization_bias

#: Not a multiple of the 32 rows or 64 columns that some kernels need.
WIDTH = 72


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 11, bias=False)
        self.last.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.last

    def forward(self, x):
        return self.last(self.norm(self.first(self.embed(x))))


class Rounded(nn.Linear):
    """Stands for a quantised layer, with weights rounded to tenths."""


def rounded(layer):
    copy = Rounded(layer.in_features, layer.out_features)
    copy.weight.data, copy.bias.data = layer.weight.data.mul(10).round() / 10, layer.bias.data.clone()
    return copy


rounded.device = "cpu"


def test_only_what_is_marked_is_made_again():
    torch.manual_seed(0)
    net, made = Net().eval(), []

    def counted(layer):
        made.append(layer)
        return rounded(layer)

    counted.device = "cpu"
    copy = QuantizedCopy(net, counted)
    assert made == [net.first], "the output layer is not quantised"
    module, before = copy.refresh(), net.first.bias.detach().clone()
    assert module.last.weight is module.embed.weight, "tied weights stay tied"
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    assert torch.equal(copy.refresh().first.bias, before), "nothing was marked"
    copy.mark(["norm.weight"])
    assert torch.equal(copy.refresh().norm.weight, net.norm.weight)
    assert len(made) == 1
    copy.mark(net.state_dict())
    module, x = copy.refresh(), torch.arange(11)
    assert len(made) == 2, "weight and bias are one layer"
    assert isinstance(module.first, Rounded)
    expected = net.last(net.norm(rounded(net.first)(net.embed(x))))
    assert torch.equal(module(x), expected)


def test_layers_that_transformers_keeps_in_float32_are_kept():
    net = Net()
    net._keep_in_fp32_modules = ["first"]
    with pytest.raises(InputError, match="no linear layers to quantize; leave out model.quantize"):
        QuantizedCopy(net, rounded)


@pytest.mark.parametrize(("form", "worst"), [("int8", 0.02), ("nf4", 0.2)])
def test_bitsandbytes_layers_are_close_to_full_precision(form, worst):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    net = Net().eval()
    copy = QuantizedCopy(net, Quantization(form))
    with torch.no_grad():
        net.first.weight.add_(torch.randn(WIDTH, WIDTH))
    copy.mark(["first.weight"])
    meter, x = CostMeter(), torch.arange(11)
    with torch.inference_mode():
        with meter.asking():
            found = copy.refresh()(x)
        spent, expected = meter.take()["flops"], net(x)
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < worst
    assert spent == 2 * 11 * (WIDTH * WIDTH + WIDTH * 11), "operations do not depend on how weights are stored"


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_a_quantised_study_of_language_models_reports_its_bias(run_file, tmp_path, form):
    pytest.importorskip("bitsandbytes")
    path = run_file(("{kind: causal-lm}", f"{{kind: causal-lm, quantize: {form}}}"), ("gmp-irt, c: adaptive", "naive"))
    out = CliRunner().invoke(app, ["run", str(path), "--study", str(tmp_path / "study.sqlite")])
    assert out.exit_code == 0, out.output
    said = " ".join(out.output.split())
    assert f"Candidates were asked in {form}. On unseen items the endpoints are better by" in said
    loaded = load(path).evaluate
    values = {variable.name: 0.5 for variable in loaded.space.variables}
    items = {"quiz": [0, 1, 2]}
    soft = [ask(values, items)["quiz.soft"] for ask in (loaded, loaded.ask_exactly)]
    assert 0 < np.abs(np.subtract(*soft)).max() < 0.1
    loaded(values | {"weight.math": 1.0}, items)
    assert loaded(values, items)["quiz.soft"] == soft[0], "the copy follows what is loaded"


class Biased:
    """Endpoints that are right everywhere, but quantised wrong on every fourth item."""

    quantize = "int8"

    def ask_exactly(self, candidate, items):
        return {"quiz": [1.0] * len(items["quiz"])}

    def __call__(self, candidate, items):
        return {"quiz": [float(item % 4 != 0) for item in items["quiz"]]}


def test_the_test_is_exact_and_the_bias_is_measured_on_endpoints(tmp_path):
    objective = Objective.of("quiz")
    design = Design(
        space={"weight": SearchParameter(0.0, 1.5, per="model")},
        tasks={"quiz": StudyTask(100, test=0.4)},
        objectives=(objective,),
        models={"a": "", "b": ""},
        search=Search(population=5, generations=1),
    )
    with Study.open(tmp_path / "study.sqlite") as study:
        winner = study.run(design, Biased())
        assert winner.objectives["quiz"] < 1
        assert study.test_scores(winner) == study.test_scores("a") == {"quiz": 1.0}
        bias = quantization_bias(study, objective)
        tested = study.store.answers(study.store.trials("test", "a")[-1])["quiz"].items
        assert bias.value == pytest.approx(-np.mean(tested % 4 == 0))
        assert bias.verdict == "worse"
        assert {part.name: part.questions for part in study.cost().parts}["bias of quantisation"] == 80


def test_missing_extra_and_servers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    document = {
        "models": {"a": "a", "b": "b"},
        "method": "linear",
        "space": {"weight": {"low": 0, "high": 1, "per": "model"}},
        "tasks": {"quiz": {"kind": "function", "function": "os.path:exists", "items": 10}},
        "objectives": ["quiz"],
        "model": {"kind": "causal-lm", "quantize": "int8"},
    }
    with pytest.raises(InputError, match="model.quantize: .*'merganser\\[quantize\\]'"):
        parse(json.dumps(document), tmp_path)
    document["model"] = {"kind": "server", "path": "http://localhost", "quantize": "nf4"}
    with pytest.raises(InputError, match="quantize: a server has its own precision"):
        parse(json.dumps(document), tmp_path)
    document["model"] = {"quantize": "int2"}
    with pytest.raises(InputError, match="model.quantize: expected 'int8' or 'nf4', got 'int2'"):
        parse(json.dumps(document), tmp_path)
