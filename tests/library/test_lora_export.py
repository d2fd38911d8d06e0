import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from merganser.checkpoints.opening import open as open_checkpoint
from merganser.cli.lora import show_report
from merganser.errors import CheckpointError, InputError
from merganser.library import Library, extract_lora, merge_adapters
from merganser.library.lora import export_expert


def write(directory, tensors):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def models(tmp_path):
    rng = torch.Generator().manual_seed(0)
    base = {
        "layers.0.q.weight": torch.randn(24, 16, generator=rng),
        "layers.0.up.weight": torch.randn(16, 40, generator=rng),
        "layers.0.norm.weight": torch.ones(16),
        "embed.weight": torch.randn(50, 16, generator=rng),
    }
    tuned = dict(base)
    for name, rank in (("layers.0.q.weight", 3), ("layers.0.up.weight", 2)):
        d, m = base[name].shape
        tuned[name] = base[name] + torch.randn(d, rank, generator=rng) @ torch.randn(rank, m, generator=rng) / 10
    return write(tmp_path / "base", base), write(tmp_path / "tuned", tuned)


@pytest.mark.parametrize("turned", [False, True])
def test_an_adapter_of_enough_rank_is_the_finetuned_model(models, tmp_path, turned):
    base, tuned = models
    report = extract_lora(tuned, base, tmp_path / "adapter", rank=4, dtype="float32", fan_in_fan_out=turned)
    assert (report.modules, report.left_out) == (2, ())
    assert report.energy == pytest.approx(1, abs=1e-6)
    adapted = open_checkpoint(f"{base}+{tmp_path / 'adapter'}")
    for name in adapted.names():
        np.testing.assert_allclose(adapted.read(name), open_checkpoint(tuned).read(name), atol=1e-5)


def test_what_does_not_fit_is_named(models, tmp_path):
    base, _ = models
    tuned = {name: tensor + 0.1 for name, tensor in open_checkpoint(base).state_dict().items()}
    report = extract_lora(tuned, base, tmp_path / "adapter", rank=1)
    assert report.left_out == ("embed.weight",)
    assert report.whole == ("layers.0.norm.weight",)
    assert report.energy < 0.7
    with pytest.raises(InputError, match="exists already"):
        extract_lora(tuned, base, tmp_path / "adapter", rank=1)
    with pytest.raises(InputError, match="no weight that an adapter can change differs"):
        extract_lora(base, base, tmp_path / "none", rank=1)


def test_truncation_is_the_best_of_its_rank(models, tmp_path):
    base, tuned = models
    extract_lora(tuned, base, tmp_path / "adapter", rank=1, dtype="float32")
    name = "layers.0.q.weight"
    delta = (open_checkpoint(tuned).read(name) - open_checkpoint(base).read(name)).double().numpy()
    u, s, vt = np.linalg.svd(delta, full_matrices=False)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    b, a = (stored[f"base_model.model.layers.0.q.lora_{x}.weight"].numpy() for x in "BA")
    np.testing.assert_allclose(b @ a, (u[:, :1] * s[:1]) @ vt[:1], atol=1e-5)


def test_peft_loads_it(models, tmp_path):
    peft = pytest.importorskip("peft")
    base, tuned = models

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(16, 24, bias=False)
            self.up = torch.nn.Linear(40, 16, bias=False)

        def forward(self, x):
            return self.q(self.up(x))

    class Model(torch.nn.Module):
        def __init__(self, path):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer()])
            state = open_checkpoint(path).state_dict()
            self.load_state_dict({name: state[name] for name in self.state_dict()})

        def forward(self, x):
            return self.layers[0](x)

    extract_lora(tuned, base, tmp_path / "adapter", rank=8, dtype="float32")
    served = peft.PeftModel.from_pretrained(Model(base), tmp_path / "adapter")
    x = torch.randn(5, 40)
    with torch.no_grad():
        np.testing.assert_allclose(served(x), Model(tuned)(x), atol=1e-4)


def test_experts_leave_as_adapters(models, tmp_path):
    base, tuned = models
    library = Library.build(base, {"e": tuned}, tmp_path / "lib", rank_fraction=0.25, dtype="float32")
    report = export_expert(library.expert("e"), tmp_path / "adapter", dtype="float32")
    adapted = open_checkpoint(f"{base}+{tmp_path / 'adapter'}")
    for name in adapted.names():
        np.testing.assert_allclose(adapted.read(name), library.expert("e").read(name), atol=1e-5)
    assert report.rank == 4
    small = export_expert(library.expert("e"), tmp_path / "small", rank=1)
    assert json.loads((tmp_path / "small/adapter_config.json").read_text())["r"] == small.rank == 1


@pytest.mark.parametrize("space", ["knots", "core_space"])
def test_adapters_merge_to_an_adapter(models, tmp_path, space):
    base, tuned = models
    other = {n: t + 0.05 * torch.randn(t.shape) * (t.dim() == 2) for n, t in open_checkpoint(base).state_dict().items()}
    extract_lora(tuned, base, tmp_path / "a", rank=3, dtype="float32")
    extract_lora(other, base, tmp_path / "b", rank=2, dtype="float32")
    adapters = [tmp_path / "a", tmp_path / "b"]
    settings = {"low_rank": False, "orthogonalize": "none"}
    whole = merge_adapters(adapters, tmp_path / "sum", space=space, dtype="float32", **settings)
    assert (whole.path, whole.rank, whole.energy) == (tmp_path / "sum", 5, pytest.approx(1.0))
    origin = open_checkpoint(base)
    wanted = [open_checkpoint(f"{base}+{path}") for path in adapters]
    found = open_checkpoint(f"{base}+{tmp_path / 'sum'}")
    for name in ("layers.0.q.weight", "layers.0.up.weight"):
        total = sum(model.read(name) for model in wanted) - origin.read(name)
        np.testing.assert_allclose(found.read(name), total, atol=1e-4)
    cut = merge_adapters(adapters, tmp_path / "tsv", space=space, rank=2)
    assert cut.rank == 2
    assert 0 < cut.energy < 1
    assert json.loads((tmp_path / "tsv/adapter_config.json").read_text())["r"] == 2


def test_inputs_and_what_stands_beside_them_are_never_replaced(models, tmp_path, monkeypatch):
    base, tuned = models
    project = tmp_path / "project"
    project.mkdir()
    weights = project / "law.safetensors"
    weights.write_bytes((tuned / "model.safetensors").read_bytes())
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/notes.txt").write_text("mine")
    for out in (project, weights, base, tmp_path):
        with pytest.raises(InputError, match="cannot be replaced"):
            extract_lora(weights, base, out, rank=2, overwrite=True)
    with pytest.raises(InputError, match="out.partial was not written by merganser: it contains 'notes.txt'"):
        extract_lora(weights, base, tmp_path / "out", rank=2)
    (tmp_path / "out.partial").rename(tmp_path / "mine")
    extract_lora(weights, base, tmp_path / "out", rank=2)
    with pytest.raises(InputError, match="cannot be replaced"):
        merge_adapters([tmp_path / "out"], tmp_path, overwrite=True)
    library = Library.build(base, {"e": tuned}, tmp_path / "lib", rank_fraction=0.25)
    with pytest.raises(InputError, match="cannot be replaced"):
        export_expert(library.expert("e"), tmp_path / "lib", overwrite=True)
    monkeypatch.chdir(project)
    with pytest.raises(InputError, match="not a name"):
        extract_lora(tuned, base, ".", rank=2, overwrite=True)
    assert weights.exists()
    (project / "plain").write_text("a file")
    extract_lora(weights, base, project / "plain", rank=2, overwrite=True)
    assert open_checkpoint(f"{base}+{project / 'plain'}").names()


def test_input_is_checked_before_any_work(models, tmp_path, monkeypatch):
    base, tuned = models
    extract_lora(tuned, base, tmp_path / "a", rank=2, dtype="fp16")
    assert load_file(tmp_path / "a/adapter_model.safetensors").popitem()[1].dtype == torch.float16
    library = Library.build(base, {"e": tuned}, tmp_path / "lib", rank_fraction=0.25)
    for function in ("lora.leading_svd", "adapter_merging.merge_pairs", "lora.task_matrix"):
        monkeypatch.setattr(f"merganser.library.{function}", lambda *_: pytest.fail("work began"))
    for rank in (0, -1):
        with pytest.raises(InputError, match="rank of at least 1"):
            extract_lora(tuned, base, tmp_path / "b", rank=rank)
        with pytest.raises(InputError, match="rank of at least 1"):
            export_expert(library.expert("e"), tmp_path / "b", rank=rank)
        with pytest.raises(InputError, match="rank of at least 1"):
            merge_adapters([tmp_path / "a"], tmp_path / "b", rank=rank)
    with pytest.raises(InputError, match="known: concat, core_space, full, knots"):
        merge_adapters([tmp_path / "a"], tmp_path / "b", space="core")
    for dtype in ("fp61", torch.int8):
        with pytest.raises(InputError, match="not a dtype of adapters"):
            extract_lora(tuned, base, tmp_path / "b", dtype=dtype)
    for call in (lambda out: extract_lora(tuned, base, out), lambda out: merge_adapters([tmp_path / "a"], out)):
        with pytest.raises(InputError, match="exists already|cannot be replaced: it is the input"):
            call(tmp_path / "a")


def test_models_that_are_not_finite_are_named(models, tmp_path):
    base, tuned = models
    state = open_checkpoint(tuned).state_dict()
    for tensor in ("layers.0.q.weight", "layers.0.norm.weight"):
        bad = state | {tensor: torch.full_like(state[tensor], float("inf"))}
        with pytest.raises(CheckpointError, match=f"state dict: tensor '{tensor}' contains infinite values"):
            extract_lora(bad, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_report_says_what_servers_do_not_load(models, tmp_path, capsys):
    base, tuned = models
    changed = load_file(tuned / "model.safetensors")
    save_file(changed | {"layers.0.norm.weight": torch.full((16,), 2.0)}, tuned / "model.safetensors")
    show_report(extract_lora(tuned, base, tmp_path / "adapter", rank=4), as_json=False)
    said = capsys.readouterr().out
    assert "1 tensors are saved whole, such as 'layers.0.norm.weight'" in said
    assert "vLLM does not:\n  its config has modules_to_save" in said
    assert "'layers.0.norm.weight' is one of 1 tensors of whole weights" in said
    assert "library_name: peft" in (tmp_path / "adapter" / "README.md").read_text()
