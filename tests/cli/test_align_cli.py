"""`merganser align` on small networks of a user's own module, from a user's own directory."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from merganser.align import Symmetry, scramble, symmetry
from merganser.align.saving import list_stored_names
from merganser.cli import build
from merganser.cli.factories import build_network
from merganser.errors import InputError
from support.tiny_models import tiny_model

runner = CliRunner()
counter = itertools.count()
SOURCE = """
import torch
from torch import nn

def network():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))

def with_inputs():
    return network(), torch.zeros(2, 6)

def batches():
    x = torch.linspace(-2, 2, 60).reshape(10, 6)
    return [(x, torch.arange(10) % 3), (x + 1, torch.arange(10) % 3)]

def no_batches():
    return []

def wrong_classes():
    return [(torch.zeros(4, 6), torch.full((4,), 7))]

def broken():
    raise ZeroDivisionError("no network today")

def number():
    return 3

def uncalled():
    return nn.ReLU

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.up = nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 12)
        self.down, self.last, self.head = nn.Linear(12, 8), nn.RMSNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.last(x + self.down(self.up(self.norm(x)).relu())))

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x, task="one"):
        hidden = torch.relu(self.trunk(x))
        return self.one(hidden) if task == "one" else self.two(hidden)

class Outputs(Heads):
    def forward(self, x):
        hidden = torch.relu(self.trunk(x))
        return {"logits": self.one(hidden), "hidden": hidden, "more": self.two(hidden)}
"""


def call(*arguments):
    result = runner.invoke(build(), ["align", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def network():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A directory with a module of a name not yet imported, and three scrambled copies of one network."""
    module = f"users_network_{next(counter)}"
    (tmp_path / f"{module}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    net = network()
    free = symmetry(net, torch.zeros(2, 6))
    for position, name in enumerate("abc"):
        save_file(scramble(dict(net.state_dict()), free, seed=position), tmp_path / f"{name}.safetensors")
    return module, net


@pytest.mark.parametrize("method", ["universe", "weights", "frank_wolfe", "merge_many"])
def test_scrambled_copies_merge_to_the_network_they_came_from(user, tmp_path, method):
    module, net = user
    files = ("a.safetensors", "b.safetensors", "c.safetensors")
    shown = call(*files, "--model", f"{module}:with_inputs", "out", "--matching", method, "--json")
    report = json.loads(shown)
    assert report["objective"]["after"] > report["objective"]["before"]
    assert report["cycle_error"] == 0
    assert report["notes"] == []
    assert [pair["models"] for pair in report["pairs"]] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert all(pair["cosine"]["after"] > 0.999999 for pair in report["pairs"])
    x = torch.randn(7, 6)
    expected = net(x)
    for file in ("merged", "aligned/a", "aligned/b", "aligned/c"):
        again = network()
        again.load_state_dict(load_file(tmp_path / "out" / f"{file}.safetensors"))
        torch.testing.assert_close(again(x), expected, atol=1e-5, rtol=1e-5)
    assert len(Symmetry.from_json((tmp_path / "out/symmetry.json").read_text()).atoms) == 2


def test_rotated_copies_merge_to_the_network_they_came_from(user, tmp_path):
    module, _ = user
    net, _ = build_network(f"{module}:Block", None)
    free = symmetry(net, torch.zeros(2, 6), kind="orthogonal")
    for position, name in enumerate("ab"):
        save_file(scramble(dict(net.state_dict()), free, seed=position), tmp_path / f"{name}.safetensors")
    files = ("a.safetensors", "b.safetensors")
    call(*files, "--model", f"{module}:Block", "--shape", "2x6", "--kind", "orthogonal", "out")
    again = json.loads(call(*files, "--permutations", "out/permutations.safetensors", "--json", "again"))
    assert again["pairs"][0]["cosine"]["after"] > 0.99999 > again["pairs"][0]["cosine"]["before"]
    x = torch.randn(7, 6)
    merged = type(net)()
    merged.load_state_dict(load_file(tmp_path / "out/merged.safetensors"))
    torch.testing.assert_close(merged(x), net(x), atol=1e-4, rtol=1e-4)


def test_a_match_that_looks_like_a_local_optimum_is_noted(user, monkeypatch):
    module, _ = user
    note = "2 tries ended at different objectives"
    monkeypatch.setattr("merganser.align.matches.Match.note", note)
    arguments = ("a.safetensors", "b.safetensors", "--model", f"{module}:with_inputs", "--matching", "weights")
    assert f"note: model 1 to model 0: {note}\n" in call(*arguments, "shown")
    assert json.loads(call(*arguments, "out", "--json"))["notes"] == [f"model 1 to model 0: {note}"]


def test_permutations_serve_again_without_the_network(user, tmp_path):
    module, _ = user
    shown = call("x=a.safetensors", "b.safetensors", "--model", f"{module}:network", "--shape", "2x6", "one")
    assert "2 groups of units that move" in shown
    assert "x – b" in shown
    call("a.safetensors", "b.safetensors", "--permutations", "one/permutations.safetensors", "two")
    first, second = (load_file(tmp_path / run / "merged.safetensors") for run in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    given = ("--permutations", "one/permutations.safetensors", "--json")
    swapped = json.loads(call("b.safetensors", "a.safetensors", *given, "three"))
    assert swapped["pairs"][0]["cosine"]["after"] > 0.999999
    for run, name in (("one", "x"), ("two", "a")):
        aligned = load_file(tmp_path / run / "aligned" / f"{name}.safetensors")
        again = load_file(tmp_path / "three/aligned/a.safetensors")
        assert all(torch.equal(aligned[key], again[key]) for key in aligned)
    with pytest.raises(InputError, match=r"model 1 .* is not one of the models of one/permutations.safetensors"):
        call("a.safetensors", "c.safetensors", *given, "four")


def test_tied_weights_that_a_file_holdsonce(user, tmp_path):
    module, _ = user
    (tmp_path / f"{module}.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = nn.Embedding(9, 8)\n"
        "        self.mix = nn.Linear(8, 8)\n"
        "        self.head = nn.Linear(8, 9, bias=False)\n"
        "        self.head.weight = self.embed.weight\n"
        "    def forward(self, x):\n"
        "        return self.head(torch.relu(self.mix(self.embed(x))))\n"
        "def tied():\n"
        "    return Tied(), torch.zeros(2, 3, dtype=torch.long)\n"
    )
    for seed, name in enumerate("de"):
        torch.manual_seed(seed)
        tensors = {"embed.weight": torch.randn(9, 8), "mix.weight": torch.randn(8, 8), "mix.bias": torch.randn(8)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
        save_file(tensors | {"head.weight": tensors["embed.weight"].clone()}, tmp_path / f"{name}2.safetensors")
        torch.save(tensors | {"head.weight": tensors["embed.weight"]}, tmp_path / f"{name}3.pt")
    for kind in (".safetensors", "2.safetensors", "3.pt"):
        report = json.loads(call(f"d{kind}", f"e{kind}", "--model", f"{module}:tied", f"out{kind}", "--json"))
        out = tmp_path / f"out{kind}"
        assert set(load_file(out / "merged.safetensors")) == {"embed.weight", "mix.weight", "mix.bias"}
        pair = [load_file(file) for file in sorted((out / "aligned").iterdir())]
        assert all(set(tensors) == {"embed.weight", "mix.weight", "mix.bias"} for tensors in pair)
        squares = sum(float((pair[0][name].double() - pair[1][name].double()).square().sum()) for name in pair[0])
        assert report["pairs"][0]["distance"]["after"] == pytest.approx(squares**0.5)


def test_a_tied_weight_is_kept_under_the_name_it_came_with():
    tied = Symmetry({}, {}, aliases={"b": "a", "c": "a"})
    assert list_stored_names({"a", "b", "x"}, tied) == {"a", "x"}
    assert list_stored_names({"b", "c", "x"}, tied) == {"b", "x"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "name a function that returns the network"),
        (("--model", "nowhere.to.be.found:f"), "no module 'nowhere.to.be.found'"),
        (("--model", "MODULE"), "package.module:function"),
        (("--model", "MODULE:netwrok"), "did you mean 'network'"),
        (("--model", "MODULE:broken"), "ZeroDivisionError: no network today"),
        (("--model", "MODULE:number"), "expected an nn.Module"),
        (("--model", "MODULE:network"), "give its shape"),
        (("--model", "MODULE:network", "--shape", "two by six"), "separate the sizes by x"),
        (("--model", "MODULE:network", "--shape", "0x6"), "at least 1"),
        (("--model", "MODULE:network", "--shape", "1x7"), "does not run on the example inputs"),
        (("--model", "MODULE:uncalled"), "the class ReLU itself"),
        (("--model", "MODULE:with_inputs", "--matching", "univers"), "did you mean 'universe'"),
        (("--permutations", "a.safetensors"), "no symmetry in its header"),
        (("--permutations", "a.safetensors", "--batches", "MODULE:batches"), "--batches needs --model"),
        (("--model", "MODULE:with_inputs", "--batches", "MODULE:no_batches"), "returned no batches"),
        (("--model", "MODULE:with_inputs", "--batches", "MODULE:broken"), "failed with ZeroDivisionError"),
        (("--model", "MODULE:with_inputs", "--batches", "MODULE:wrong_classes"), "cannot use them: Target 7 is out of"),
        (("--model", "MODULE:with_inputs", "--batches", "MODULE:with_inputs"), "expected labelled batches"),
    ],
)
def test_mistakes_are_named(user, options, message):
    module, _ = user
    options = [option.replace("MODULE", module) for option in options]
    with pytest.raises(InputError, match=message):
        call("a.safetensors", "b.safetensors", "out", *options)


def test_models_that_differ_are_named(user):
    module, _ = user
    state = load_file("b.safetensors")
    save_file({**state, "0.weight": torch.zeros(13, 6)}, "wide.safetensors")
    with pytest.raises(InputError, match=r"wide.*: '0.weight' is \(13, 6\), in a.safetensors \(12, 6\)"):
        call("a.safetensors", "wide.safetensors", "out", "--model", f"{module}:with_inputs")
    save_file({**state, "extra": torch.zeros(2)}, "more.safetensors")
    with pytest.raises(InputError, match=r"more.safetensors and the symmetry differ in 1 tensors; 'extra' is only in"):
        call("a.safetensors", "more.safetensors", "out", "--model", f"{module}:with_inputs")


def test_barriers_before_and_after_are_those_of_the_definition(user, tmp_path):
    """Against a plain loop over the weights between two networks."""
    from merganser.report import report as write_report

    module, _ = user
    files = ("a.safetensors", "b.safetensors", "c.safetensors")
    options = ("--model", f"{module}:with_inputs", "--batches", f"{module}:batches")
    shown = call(*files, "out", *options, "--json")
    segments = json.loads(shown)["landscape"]["segments"]
    assert [each["models"] for each in segments] == [["a", "b"], ["a", "c"], ["b", "c"]]
    x = torch.linspace(-2, 2, 60).reshape(10, 6)
    y = torch.arange(10) % 3
    for place, when in (("", "before"), ("out/aligned/", "after")):
        first, second = (load_file(tmp_path / f"{place}{name}.safetensors") for name in "ab")
        losses = []
        for share in torch.linspace(0, 1, 11).tolist():
            again = network()
            again.load_state_dict({name: (1 - share) * first[name] + share * second[name] for name in first})
            with torch.no_grad():
                losses.append(sum(float(nn.functional.cross_entropy(again(inputs), y)) for inputs in (x, x + 1)) / 2)
        expected = max(losses) - (losses[0] + losses[-1]) / 2
        assert segments[0][when]["barrier"] == pytest.approx(expected, abs=1e-5)
    assert segments[0]["before"]["barrier"] > 0.001 > segments[0]["after"]["barrier"]
    page, [found] = write_report(tmp_path / "out")
    html = page.render()
    assert "lowered the loss barrier of 3 of 3 pairs" in html
    assert html.count('<figure class="chart"') >= 3, "a chart for every two networks"
    assert "Every step" not in html
    assert len(html) < 200_000
    assert "plane" not in found["landscape"], "aligned copies lie on one point"


def test_nothing_is_replaced_unasked(user, tmp_path):
    module, _ = user
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    arguments = ("a.safetensors", "b.safetensors", "--model", f"{module}:with_inputs", "out")
    with pytest.raises(InputError, match="exists already"):
        call(*arguments)
    call(*arguments, "--overwrite")
    assert (tmp_path / "out/merged.safetensors").exists()
    with pytest.raises(InputError, match="at least two"):
        call("a.safetensors", "--model", f"{module}:with_inputs", "out2")


@pytest.mark.parametrize(
    ("out", "message"),
    [("in", "in/a.safetensors is in it"), (".", "not a name"), ("a.safetensors/x", "is not a directory")],
)
def test_inputs_are_never_replaced_and_impossible_places_are_named_first(user, tmp_path, out, message):
    """Said before any work: the model that is named here cannot even be imported."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / f"in/{name}.safetensors").write_bytes((tmp_path / f"{name}.safetensors").read_bytes())
    with pytest.raises(InputError, match=message):
        call("in/a.safetensors", "in/b.safetensors", "--model", "no.such:thing", out, "--overwrite")
    assert {file.name for file in (tmp_path / "in").iterdir()} == {"a.safetensors", "b.safetensors"}


def test_a_neighbour_called_partial_is_left_alone(user, tmp_path):
    module, _ = user
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/mine").write_text("kept")
    with pytest.raises(InputError, match="out.partial was not written by merganser: it contains 'mine'"):
        call("a.safetensors", "b.safetensors", "--model", f"{module}:with_inputs", "out")
    assert (tmp_path / "out.partial/mine").read_text() == "kept"


def test_weights_the_example_leaves_out(user, tmp_path):
    module, _ = user
    for seed, name in enumerate("de"):
        torch.manual_seed(seed)
        layers = {"trunk": nn.Linear(6, 12), "one": nn.Linear(12, 3), "two": nn.Linear(12, 2)}
        save_file(nn.ModuleDict(layers).state_dict(), tmp_path / f"{name}.safetensors")
    arguments = ("d.safetensors", "e.safetensors", "--model", f"{module}:Heads", "--shape", "2x6", "out")
    with pytest.raises(InputError, match=r"'two\.weight'.*--allow-unused"):
        call(*arguments)
    call(*arguments, "--allow-unused")
    assert (tmp_path / "out/merged.safetensors").exists()


def test_only_the_outputs_that_count_pin_units(user, tmp_path):
    module, _ = user
    for seed, name in enumerate("de"):
        torch.manual_seed(seed)
        layers = {"trunk": nn.Linear(6, 12), "one": nn.Linear(12, 3), "two": nn.Linear(12, 2)}
        save_file(nn.ModuleDict(layers).state_dict(), tmp_path / f"{name}.safetensors")
    arguments = ("d.safetensors", "e.safetensors", "--model", f"{module}:Outputs", "--shape", "2x6", "--json")
    assert json.loads(call(*arguments, "all"))["atoms"] == 0
    assert json.loads(call(*arguments, "some", "--output", "logits", "--output", "more"))["atoms"] == 1
    with pytest.raises(InputError, match="no output 'logit'; it returns logits, hidden, more"):
        call(*arguments, "none", "--output", "logit")
    assert not (tmp_path / "none").exists()


def test_a_network_without_example_inputs_is_a_network_all_the_same(user):
    module, _ = user
    network, inputs = build_network(f"{module}:network")
    assert isinstance(network, nn.Module)
    assert inputs is None


def test_models_of_transformers_need_no_function_and_load_again(tmp_path, monkeypatch):
    """The network is built from the config; the results are directories, and the aligned ones compute the same."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    networks = {}
    for seed, name in enumerate(("a", "b")):
        networks[name] = tiny_model(transformers.LlamaForCausalLM, {}, seed).eval()
        networks[name].save_pretrained(name)
    result = runner.invoke(build(), ["align", "./a", "./b", "out", "--kind", "orthogonal"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "aligned/, merged/" in result.output
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.isfinite(load("out/merged")(tokens).logits).all()
    for name, network in networks.items():
        again = load(f"out/aligned/{name}").eval()
        torch.testing.assert_close(again(tokens).logits, network(tokens).logits, atol=1e-4, rtol=1e-3)
    assert runner.invoke(build(), ["report", "out"], catch_exceptions=False).exit_code == 0


def test_the_note_on_a_large_network_leaves_json_alone(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("merganser.align.configs.TESTED", 0)
    for seed, name in enumerate(("a", "b")):
        tiny_model(transformers.LlamaForCausalLM, {}, seed).save_pretrained(name)
    result = runner.invoke(build(), ["align", "./a", "./b", "out", "--json"], catch_exceptions=False)
    assert "without a self-test" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["merged"] == "merged/"
    assert all(json.loads(line) for line in result.stdout.splitlines())


def test_weights_without_a_config_ask_for_the_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        save_file({"weight": torch.zeros(2, 2)}, f"{name}.safetensors")
    with pytest.raises(InputError, match="name a function that returns the network .*--permutations of an earlier"):
        runner.invoke(build(), ["align", "a.safetensors", "b.safetensors", "out"], catch_exceptions=False)
