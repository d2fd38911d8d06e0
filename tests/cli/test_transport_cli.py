"""`merganser transport` on a user's network and on a model of transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from merganser.align import scramble, symmetry
from merganser.align.permutations import apply, random
from merganser.cli import build
from merganser.errors import InputError
from merganser.recipes import saving
from support.architectures import ARCHITECTURES
from support.tiny_models import tiny_model

runner = CliRunner()
SOURCE = """
import torch
from torch import nn

def network():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)), torch.zeros(2, 6)

def small_weights(state):
    return -float(state["0.weight"].norm())
"""


def call(*arguments):
    result = runner.invoke(build(), ["transport", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def releases(tmp_path, monkeypatch):
    """An old base, an expert, and the old base scrambled as the new one; what the expert becomes there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "transported_net.py").write_text(SOURCE)
    import transported_net

    torch.manual_seed(0)
    net, x = transported_net.network()
    free = symmetry(net, x)
    old = dict(net.state_dict())
    expert = {name: t + 0.05 * torch.randn(t.shape) for name, t in old.items()}
    order = random(free, 1)
    for name, state in {"old": old, "expert": expert, "new": apply(free, order, old)}.items():
        save_file(state, f"{name}.safetensors")
    return apply(free, order, expert)


BASES = ("expert.safetensors", "out", "--from", "old.safetensors", "--to", "new.safetensors")
NET = ("--model", "transported_net:network")


@pytest.mark.parametrize("more", [(), ("--start", "identity"), ("--matching", "frank_wolfe"), ("--kind", "orthogonal")])
def test_an_expert_moves_to_a_scrambled_base(releases, more):
    lines = [json.loads(line) for line in call(*BASES, *NET, *more, "--json").stdout.splitlines()]
    assert lines[0]["cosine"]["after"] > 0.999999 > lines[0]["cosine"]["before"]
    found = load_file("out/model.safetensors")
    for name, tensor in releases.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5)


def test_without_matching_it_is_task_arithmetic(releases):
    shown = call(*BASES, "--matching", "none", "--scale", "0.5").stdout
    assert "scale      0.5" in shown
    old, expert, new = (load_file(f"{name}.safetensors") for name in ("old", "expert", "new"))
    for name, tensor in load_file("out/model.safetensors").items():
        torch.testing.assert_close(tensor, new[name] + 0.5 * (expert[name] - old[name]))


def test_the_scale_is_chosen_by_a_score(releases):
    given = ("--score", "transported_net:small_weights", "--try-scale", "1", "--try-scale", "-1", "--try-scale", "0.1")
    report = json.loads(call(*BASES, *NET, *given, "--json").stdout.splitlines()[0])
    assert set(report["scores"]) == {"1.0", "-1.0", "0.1"}
    assert report["scores"][str(report["scale"])] == max(report["scores"].values())


def test_a_dry_run_writes_nothing(releases, tmp_path):
    assert "memory" in call(*BASES, *NET, "--dry-run").stdout
    assert not (tmp_path / "out").exists()


def test_the_plan_shown_is_the_merge_that_is_written(releases, monkeypatch):
    prepare, prepared = saving.prepare, []
    monkeypatch.setattr(saving, "prepare", lambda *args: prepared.append(prepare(*args)) or prepared[-1])
    given = (*BASES, *NET, "--dtype", "bfloat16", "--json")
    plans = [json.loads(call(*given, *more).stdout.splitlines()[1]) for more in [("--dry-run",), ()]]
    assert plans[0] == plans[1]
    assert plans[0]["bytes_out"] == sum(2 * tensor.numel() for tensor in load_file("out/model.safetensors").values())
    assert len(prepared) == len(plans)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "has no config of a model that transformers knows"),
        ((*NET, "--matching", "magic"), "unknown --matching 'magic'"),
        ((*NET, "--start", "end"), "unknown --start 'end'"),
        ((*NET, "--kind", "affine"), "unknown --kind 'affine'"),
        ((*NET, "--try-scale", "1"), "--try-scale needs --score"),
        ((*NET, "--scale", "1", "--score", "transported_net:small_weights"), "exclude each other"),
        ((*NET, "--scale", "nan"), "must be finite"),
        ((*NET, "--score", "transported_net:small_weights", "--try-scale", "inf"), "must be finite"),
        ((*NET, "--score", "transported_net:nothing"), "has no function 'nothing'"),
        (("--matching", "none", "--from", "short.safetensors"), "no task vector"),
        (("--matching", "none", "--to", "short.safetensors"), "which short.safetensors does not have"),
    ],
)
def test_what_cannot_be_moved_is_refused(releases, tmp_path, more, message):
    save_file({"0.weight": torch.zeros(12, 6)}, "short.safetensors")
    with pytest.raises(InputError, match=message):
        call(*BASES, *more)
    assert not (tmp_path / "out").exists()


def test_an_occupied_place_is_refused_before_any_work(releases, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(InputError, match="out"):
        call(*BASES, *NET)


def test_a_model_of_transformers_needs_no_factory(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=1
    )
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(config)
    free = symmetry(net, net.dummy_inputs, self_test=False)
    tuned = transformers.LlamaForCausalLM(config)
    tuned.load_state_dict({n: t + 0.01 * torch.randn(t.shape) for n, t in net.state_dict().items()})
    for name, model in {"old": net, "expert": tuned, "new": scramble(net, free, 2)}.items():
        model.save_pretrained(tmp_path / name)
    call(
        tmp_path / "expert",
        tmp_path / "out",
        "--from",
        tmp_path / "old",
        "--to",
        tmp_path / "new",
        "--start",
        "spectra",
    )
    moved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(moved(tokens).logits, tuned(tokens).logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["ConvNextForImageClassification", "CLIPModel", "WhisperForConditionalGeneration"])
def test_the_inputs_of_a_model_of_transformers(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for seed, part in enumerate(("old", "new", "tuned")):
        tiny_model(getattr(transformers, name), ARCHITECTURES[name], seed).save_pretrained(part)
    call("./tuned", "--from", "./old", "--to", "./new", "out")
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wav2Vec2ForCTC", "inputs it runs on .--model net:build"),
        ("ViTForImageClassification", "does not have under this name: name a function"),
    ],
)
def test_a_model_that_cannot_be_built_for_the_user(name, message, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for seed, part in enumerate(("old", "new", "tuned")):
        tiny_model(getattr(transformers, name), ARCHITECTURES[name], seed).save_pretrained(part)
    if name.startswith("ViT") and set(load_file("new/model.safetensors")) == set(
        tiny_model(getattr(transformers, name), ARCHITECTURES[name], 1).state_dict()
    ):
        pytest.skip("this version of transformers has the names of the checkpoint")
    with pytest.raises(InputError, match=message):
        call("./tuned", "--from", "./old", "--to", "./new", "out")
