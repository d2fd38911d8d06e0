"""Libraries within a budget over all codes: bytes, errors, shared parts, and everything that reads experts."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import merganser as mg
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import CheckpointError, InputError
from merganser.interference.surveys import survey
from merganser.library import Library
from merganser.library.codes.coding import Delta, encode
from merganser.library.codes.mixed_factors import MixedFactors
from merganser.library.expert_file import ExpertFile
from merganser.library.lora import export_expert
from merganser.library.reporting import describe_stored_tensors, layer_of, sum_by_layer
from merganser.library.views import Expert
from merganser.routing import AdaptiveModel
from merganser.routing.layers import task_cosines
from support.library_models import base_tensors, expert_tensors, experts

LEVELS = ("levels", "shared")
FLOATS = ("a.weight", "b.weight", "c.weight", "norm.weight", "bias")


def energy_kept(library, name, expert):
    base = library.base
    lost, seen = 0.0, 0.0
    for tensor in FLOATS:
        lost += float((library.expert(name).read(tensor).double() - expert[tensor].double()).square().sum())
        seen += float((base.read(tensor).double() - expert[tensor].double()).square().sum())
    return 1 - lost / seen


def related(base, count=3):
    """Experts that have most of their change in common."""
    common = expert_tensors(base, 1)
    rng = torch.Generator().manual_seed(7)
    return {
        f"e{index}": {
            name: tensor + 0.02 * torch.randn(tensor.shape, generator=rng) if name in FLOATS else tensor
            for name, tensor in common.items()
        }
        for index in range(count)
    }


@pytest.mark.parametrize("budget", [2500, 6000, 20000])
def test_budget_holds_and_energy_is_what_comes_back(models, tmp_path, budget):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", budget=budget)
    used = sum(path.stat().st_size for path in (tmp_path / "lib/experts").iterdir())
    assert used == sum(library.size().experts.values()) <= budget
    for name, path in experts(models).items():
        kept = energy_kept(library, name, open_checkpoint(path))
        assert kept == pytest.approx(library.manifest.experts[name].energy, abs=1e-6)
    if budget == 20000:  # the least that plain factors need is 8,664 bytes
        plain = Library.build(models["base"], experts(models), tmp_path / "plain", budget=budget, dtype="int8")
        energies = [sum(r.energy for r in each.manifest.experts.values()) for each in (library, plain)]
        assert energies[0] > energies[1]


def test_enough_bytes_give_the_experts_back(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", budget="1MB")
    for name, path in experts(models).items():
        assert all(torch.equal(library.expert(name).read(t), open_checkpoint(path).read(t)) for t in FLOATS)
    assert library.size().ratio < 4


def test_a_budget_that_holds_no_header_is_refused(models, tmp_path):
    with pytest.raises(InputError, match="too small: headers and new tensors need"):
        Library.build(models["base"], experts(models), tmp_path / "lib", budget=100)
    assert not (tmp_path / "lib").exists()


def test_the_same_build_has_the_same_bytes_and_files_are_read_alike(models, tmp_path):
    one, two = (Library.build(models["base"], experts(models), tmp_path / n, budget=5000) for n in ("one", "two"))
    for name in one.experts:
        assert one.manifest.experts[name].sha256 == two.manifest.experts[name].sha256
        again = Library(tmp_path / "one").expert(name)
        for tensor in FLOATS:
            assert torch.equal(again.read(tensor), one.expert(name).read(tensor))
            if again.spec(tensor).shape[0] > 9:
                np.testing.assert_allclose(again.read(tensor, (3, 9)), again.read(tensor)[3:9], atol=1e-6)


@pytest.mark.parametrize("codes", [["signs"], ["levels"], ["factors"], ["levels", "shared"]])
def test_codes_can_be_named(models, tmp_path, codes):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", budget=6000, codes=codes)
    known = {*codes, "whole", "dropped", "residual levels"}
    assert {each.code for name in library.experts for each in describe_stored_tensors(library, name)} <= known
    grown = library.add("new", models["math"])
    assert {each.code for each in describe_stored_tensors(grown, "new")} <= known


def test_what_experts_share_is_stored_once(tmp_path):
    base = base_tensors()
    states = related(base)
    library = Library.build(base, states, tmp_path / "lib", budget=9000)
    apart = Library.build(base, states, tmp_path / "apart", budget=9000, codes=["signs", "levels", "factors"])
    size = library.size()
    assert size.shared == (tmp_path / "lib/shared.safetensors").stat().st_size > 0
    assert size.total - size.base <= 9000
    assert any(library.expert("e0").file.is_residual(tensor) for tensor in library.expert("e0").file.kinds)
    for name, state in states.items():
        record = library.manifest.experts[name]
        assert record.energy == pytest.approx(energy_kept(library, name, state), abs=1e-6)
        assert record.energy > apart.manifest.experts[name].energy
    grown = library.add("new", related(base, 4)["e3"], budget=1800)
    assert any(grown.expert("new").file.is_residual(tensor) for tensor in grown.expert("new").file.kinds)
    assert all(finding.sound for finding in grown.verify())
    rest = grown.remove("e0")
    assert rest.expert("e1").read("a.weight").shape == (48, 32)


def test_a_damaged_or_missing_shared_part_is_named(tmp_path):
    base = base_tensors()
    library = Library.build(base, related(base), tmp_path / "lib", budget=9000, codes=LEVELS)
    path = tmp_path / "lib/shared.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "shared" in [finding.part for finding in library.verify() if not finding.sound]
    with pytest.raises(CheckpointError, match="shared.safetensors: damaged"):
        Library(tmp_path / "lib").expert("e0")
    path.unlink()
    with pytest.raises(CheckpointError, match="shared.safetensors: missing"):
        Library(tmp_path / "lib").expert("e0")
    manifest = json.loads((tmp_path / "lib/library.json").read_text())
    (tmp_path / "lib/library.json").write_text(json.dumps(manifest | {"shared": None}))
    with pytest.raises(CheckpointError, match="needs a shared part"):
        Library(tmp_path / "lib").expert("e0")


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"bias::code": (48,)}, "has no factors"),
        ({"a.weight::code": (48, 32), "a.weight::full": None}, "is not part of an expert"),
        ({"a.weight::residual": (48, 32)}, "needs a shared part"),
        ({"a.weight::code": (32, 48)}, "not in the base"),
        ({"other.weight::code": (48, 32)}, "not in the base"),
        ({"a.weight::u": None}, "is not part of an expert"),
        ({"a.weight::code": None}, "it is not a code"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, stored, message):
    tensors = {}
    for key, shape in stored.items():
        blob = b"" if shape is None else encode(Delta(torch.randn(shape)), MixedFactors(1)).blob
        tensors[key] = torch.zeros(2, 2) if shape is None else torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Expert(open_checkpoint(base_tensors()), ExpertFile(tmp_path / "x.safetensors"), "x")


def test_an_interrupted_build_goes_on_with_its_codes(tmp_path, monkeypatch):
    from merganser.library.building import Compressor

    base = base_tensors()
    compress = Compressor.compress

    def failing(self, name, *others):
        if name == "e2":
            raise OSError("disk full")
        return compress(self, name, *others)

    monkeypatch.setattr(Compressor, "compress", failing)
    with pytest.raises(mg.MerganserError, match="disk full"):
        Library.build(base, related(base), tmp_path / "lib", budget=9000, codes=LEVELS)
    monkeypatch.undo()
    with pytest.raises(InputError, match="another rule"):
        Library.build(base, related(base), tmp_path / "lib", budget=9000, codes=["signs"])
    done = Library.build(base, related(base), tmp_path / "lib", budget=9000, codes=LEVELS)
    whole = Library.build(base, related(base), tmp_path / "whole", budget=9000, codes=LEVELS)
    assert [r.sha256 for r in done.manifest.experts.values()] == [r.sha256 for r in whole.manifest.experts.values()]


def test_rows_of_an_embedding_that_nobody_trained_cost_nothing(tmp_path):
    base = {"embeddings.weight": torch.randn(2000, 32)}
    tuned = base["embeddings.weight"].clone()
    tuned[::100] += torch.randn(20, 32)
    library = Library.build(base, {"e": {"embeddings.weight": tuned}}, tmp_path / "lib", budget=1500)
    assert library.manifest.experts["e"].energy > 0.98
    still = torch.ones(2000, dtype=torch.bool)
    still[::100] = False
    assert torch.equal(library.expert("e").read("embeddings.weight")[still], base["embeddings.weight"][still])


def test_gram_matrices_move_errors_to_where_inputs_are_small(tmp_path):
    base = {"layer.weight": torch.randn(40, 48)}
    expert = {"layer.weight": base["layer.weight"] + 0.1 * torch.randn(40, 48)}
    inputs = torch.randn(300, 48) * torch.logspace(0, -2, 48)
    grams = {"layer.weight": inputs.T @ inputs / 300}
    outputs = []
    for name, given in (("plain", None), ("weighted", {"e": grams})):
        library = Library.build(base, {"e": expert}, tmp_path / name, budget=900, codes=["factors"], grams=given)
        off = library.expert("e").read("layer.weight") - expert["layer.weight"]
        outputs.append(float((inputs @ off.T).square().sum()))
    assert outputs[1] < 0.7 * outputs[0]
    with pytest.raises(InputError, match="no expert 'x'"):
        Library.build(base, {"e": expert}, tmp_path / "lib", budget=900, grams={"x": grams})
    with pytest.raises(InputError, match="give a budget"):
        Library.build(base, {"e": expert}, tmp_path / "lib", grams={"e": grams})
    wrong = {
        "expected \\[48, 48\\]": torch.eye(3),
        "negative eigenvalues": -torch.eye(48),
        "NaN": torch.full((48, 48), math.nan),
    }
    for complaint, gram in wrong.items():
        with pytest.raises(InputError, match=f"e: 'layer.weight': its Gram matrix .*{complaint}"):
            Library.build(base, {"e": expert}, tmp_path / "lib", budget=900, grams={"e": {"layer.weight": gram}})


def test_options_that_exclude_each_other_are_refused(models, tmp_path):
    build = [models["base"], experts(models), tmp_path / "lib"]
    with pytest.raises(InputError, match="codes are chosen within a budget"):
        Library.build(*build, codes=["signs"])
    with pytest.raises(InputError, match="did you mean 'levels'"):
        Library.build(*build, codes=["level"], budget=5000)
    with pytest.raises(InputError, match="leave it out"):
        Library.build(*build, codes=["signs"], budget=5000, dtype="int8")


def test_report_adds_up(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", budget=4000)
    rows = describe_stored_tensors(library, "math")
    assert sum(row.nbytes for row in rows) < library.size().experts["math"]
    assert {row.tensor for row in rows} == set(FLOATS)
    lost = sum(row.error for row in rows) / sum(row.energy for row in rows)
    assert 1 - lost == pytest.approx(library.manifest.experts["math"].energy, abs=1e-3)
    base, expert, stored = mg.open(models["base"]), mg.open(experts(models)["math"]), library.expert("math")
    for row in rows:
        change, missing = (expert[row.tensor] - other[row.tensor] for other in (base, stored))
        assert row.lost == pytest.approx(float(missing.square().sum() / change.square().sum()), abs=1e-3), row.tensor
    layers = sum_by_layer(rows)
    assert [layer.layer for layer in layers if layer.layer in ("a", "b")] == ["a", "b"]
    assert layer_of("h.11.mlp.0.weight") == "h.11.mlp.0"
    page = mg.report.report(tmp_path / "lib")[0].render()
    assert "Size and error" in page
    assert "signs, levels, factors, shared within 4,000 bytes" in page
    factors = Library.build(models["base"], experts(models), tmp_path / "plain")
    assert {row.error for row in describe_stored_tensors(factors, "math") if row.code == "plain factors"} == {None}
    assert [layer.lost for layer in sum_by_layer(describe_stored_tensors(factors, "math")) if layer.layer == "a"] == [
        None
    ]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("codes", [["levels"], ["factors"], None])
def test_everything_that_reads_experts_takes_codes(tmp_path, codes):
    torch.manual_seed(0)
    module = Net().eval()
    base = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    states = {n: {k: v + 0.1 * torch.randn(v.shape) for k, v in base.items()} for n in ("x", "y", "z")}
    library = Library.build(base, states, tmp_path / "lib", budget=9000, codes=codes)
    model = AdaptiveModel(module, library, layer="down")
    assert model(torch.randn(5, 16)).output.shape == (5, 16)
    cosines = task_cosines(library)
    flat = torch.stack([torch.cat([library.expert(n).delta(k).flatten() for k in base]) for n in states]).double()
    expected = nn.functional.normalize(flat, dim=1) @ nn.functional.normalize(flat, dim=1).T
    torch.testing.assert_close(cosines, expected, atol=1e-5, rtol=0)
    merged = library.merge(["x", "y"]).state_dict()
    rebuilt = {n: library.expert(n).state_dict() for n in ("x", "y")}
    direct = mg.merge(rebuilt, "tsv", base, convolutions=True)
    for name in base:
        torch.testing.assert_close(merged[name], direct[name], atol=1e-4, rtol=1e-3)
    assert survey(library).matrices
    saved = library.extract("x", tmp_path / "out")
    assert torch.equal(open_checkpoint(saved).read("up.weight"), library.expert("x").read("up.weight"))
    report = export_expert(library.expert("x"), tmp_path / "lora", budget=2000)
    assert sum(p.stat().st_size for p in (tmp_path / "lora").glob("*.safetensors")) < 4000
    assert 0 < report.energy <= 1
    assert export_expert(library.expert("x"), tmp_path / "full-lora").energy > report.energy
