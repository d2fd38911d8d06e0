"""What the screens are given."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.engine.disk import Disk
from merganser.engine.lock import Lock
from merganser.methods import registry
from merganser.methods.base import Method
from merganser.methods.parameters import param
from merganser.report.directories import DIRECTORIES, FILES
from merganser.studio.discovery import discover
from merganser.studio.roots import Outside, Roots
from studio.conftest import MIX, events


def test_home_shows_what_is_in_the_folder(client, folder):
    found = client.get("/api/home").json()
    kinds = {item["path"]: item["kind"] for item in found["items"]}
    expected = dict.fromkeys(("base", "math", "code"), "checkpoint") | dict.fromkeys(
        ("recipe.yml", "kit.yml"), "recipe"
    )
    assert kinds == expected | {"library": "library", "study.sqlite": "study", "quiz.jsonl": "questions"}
    base = next(item for item in found["items"] if item["path"] == "base")
    opened = mg.open(folder / "base")
    assert base["facts"]["parameters"] == sum(opened.spec(name).numel for name in opened.names())
    assert base["facts"]["live"]
    assert 0 < found["machine"]["memory_free"] <= found["machine"]["memory_total"]


def test_home_agrees_with_the_report_on_what_things_are(folder):
    names = {"library": "Expert library", "checkpoint": "Checkpoint", "study": "Study"}
    for item in discover(Roots([folder])):
        path = folder / item.path
        known = [kind.name for kind in (*DIRECTORIES, *FILES) if kind.recognise(path)]
        assert known[:1] == ([names[item.kind]] if item.kind in names else []), item


def test_single_files_half_written_and_hidden_ones(folder):
    (folder / "loose").mkdir()
    (folder / "math" / "model.safetensors").rename(folder / "loose" / "a.safetensors")
    (folder / "loose" / "broken.safetensors").write_bytes(b"\xff" * 20)
    (folder / "out.partial").mkdir()
    (folder / "out.partial" / "model.safetensors").write_bytes(b"")
    (folder / ".hidden.yml").write_text("method: linear\n")
    found = {item.path: item for item in discover(Roots([folder]))}
    assert found["loose/a.safetensors"].kind == "checkpoint"
    assert found["loose/broken.safetensors"].facts == {"damaged": True}
    assert not any("partial" in path or "hidden" in path for path in found)


STRANGE = {
    "a shape that is a text": ("model.safetensors", {"w": {"dtype": "F32", "shape": "abc"}}),
    "a shape of texts": ("model.safetensors", {"w": {"dtype": "F32", "shape": ["x", None]}}),
    "a shape that is a number": ("model.safetensors", {"w": {"dtype": "F32", "shape": 5}}),
    "experts that are a number": ("library.json", {"experts": 5}),
    "no experts": ("library.json", {"experts": None}),
}


@pytest.mark.parametrize("what", list(STRANGE))
def test_a_damaged_file_does_not_hide_the_others(tmp_path, what):
    name, content = STRANGE[what]
    text = json.dumps(content).encode()
    for folder in ("good", "strange"):
        (tmp_path / folder).mkdir()
    mg.save({"w": torch.ones(2)}, tmp_path / "good/model")
    prefix = len(text).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    (tmp_path / "strange" / name).write_bytes(prefix + text)
    assert {item.path for item in discover(Roots([tmp_path]))} == {"good/model", "strange"}


def test_a_file_without_a_header_is_damaged(tmp_path):
    (tmp_path / "garbage.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "text.safetensors").write_bytes((5).to_bytes(8, "little") + b"text\n")
    mg.save({"w": torch.ones(2)}, tmp_path / "good")
    damaged = {item.path: item.facts.get("damaged", False) for item in discover(Roots([tmp_path]))}
    assert damaged == {"garbage.safetensors": True, "text.safetensors": True, "good": False}


def test_a_chat_template_from_elsewhere_is_refused(tmp_path):
    mg.save({"w": torch.ones(2)}, tmp_path / "in/a")
    (tmp_path / "own.jinja").write_text("secret")
    document = {"method": "linear", "models": ["a"], "output": {"chat_template": str(tmp_path / "own.jinja")}}
    with pytest.raises(Outside):
        Roots([tmp_path / "in"]).load(document)
    for known in ("chatml", "{{ messages }}"):
        Roots([tmp_path / "in"]).load(document | {"output": {"chat_template": known}})


def test_the_base_that_an_adapter_names_is_looked_for_in_the_folder(client, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "lora").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 1, "lora_alpha": 1, "target_modules": []}
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    hidden = mg.open(folder / "base").spec("model.layers.0.self_attn.q_proj.weight").shape
    factors = {f"{name}.lora_A.weight": torch.ones(1, hidden[1]), f"{name}.lora_B.weight": torch.ones(hidden[0], 1)}
    save_file(factors, folder / "lora" / "adapter_model.safetensors")
    found = client.get("/api/difference", params={"first": "base", "second": "lora"})
    changed = [e["name"] for e in events(found) if e["event"] == "tensor" and e["distance"]]
    assert changed == ["model.layers.0.self_attn.q_proj.weight"]
    (item,) = [i for i in client.get("/api/home").json()["items"] if i["path"] == "lora"]
    assert item["kind"] == "adapter"


def test_a_checkpoint_and_its_difference_from_another(client, folder):
    found = client.get("/api/checkpoint", params={"path": "math"}).json()
    assert found["config"]["num_hidden_layers"] == 2
    assert all(check["holds"] for check in found["checks"])
    start, *rows, end = events(client.get("/api/difference", params={"first": "base", "second": "math"}))
    a, b = (mg.open(folder / name).state_dict() for name in ("base", "math"))
    assert start["total"] == len(rows) == len(mg.open(folder / "base").names())
    for row in rows:
        x, y = a[row["name"]].double(), b[row["name"]].double()
        assert row["distance"] == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-4)
        assert row["changed"] == pytest.approx(float((x != y).double().mean()))
    assert end["only_first"] == end["only_second"] == end["reshaped"] == []


def test_the_form_is_made_from_the_schema_of_recipes(client, monkeypatch):
    registry.registry()  # all of them, before the copy that forgets the new one
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @registry.register
    @dataclass(frozen=True)
    class Stranger(Method):
        """Somebody else's rule."""

        name: ClassVar[str] = "stranger"
        summary: ClassVar[str] = "of a plugin"
        twist: float = param(0.25, "how much to twist", low=0, high=0.5)

        def merge(self, group, state=None):
            return group.models[0]

    schema = client.get("/api/schema").json()
    rules = {name: rule["then"] for rule in schema["$defs"]["methods"]["allOf"] for name in _names(rule)}
    methods = client.get("/api/methods").json()
    assert {method["name"] for method in methods} <= set(rules)
    density = rules["ties"]["properties"]["parameters"]["properties"]["density"]
    assert (density["minimum"], density["maximum"], density["default"]) == (0, 1, 0.2)
    assert "arXiv" in rules["ties"]["description"]
    twist = rules["stranger"]["properties"]["parameters"]["properties"]["twist"]
    assert twist == {
        "description": "how much to twist",
        "$ref": "#/$defs/real",
        "default": 0.25,
        "minimum": 0,
        "maximum": 0.5,
    }


def _names(rule):
    return rule["if"]["properties"]["method"]["enum"]


def test_a_recipe_as_text_and_as_a_form(client):
    found = client.post("/api/recipe", json={"document": MIX}).json()
    assert found["problems"] == []
    assert found["plan"]["methods"] == {"task_arithmetic": found["plan"]["tensors"]}
    again = client.post("/api/recipe", json={"text": found["text"]}).json()
    assert again["document"] == MIX
    assert again["plan"] == found["plan"]
    kit = client.get("/api/recipe", params={"path": "kit.yml"}).json()
    assert kit["dialect"] == "mergekit"
    assert kit["plan"]["methods"] == {"linear": kit["plan"]["tensors"]}
    native = client.post("/api/recipe", json={"text": kit["native"]}).json()
    assert native["dialect"] == "native"
    assert native["plan"]["methods"] == kit["plan"]["methods"]


def test_problems_name_their_lines(client):
    text = "method: tiez\nmodels:\n  - math\n  - {path: code, weigth: 1}\n"
    lines = {p["line"] for p in client.post("/api/recipe", json={"text": text}).json()["problems"]}
    assert 1 in lines
    text = "method: ties\nbase: base\nmodels:\n  - math\n  - {path: code, weigth: 1}\n"
    [problem] = client.post("/api/recipe", json={"text": text}).json()["problems"]
    assert problem["line"] == 5
    assert "did you mean 'weight'" in problem["message"]
    text = (
        "method: ties\nbase: base\nmodels: [math, code]\nparameters:\n  scale: 1\n  density: 3\noutput: {dtype: int3}\n"
    )
    problems = client.post("/api/recipe", json={"text": text}).json()["problems"]
    assert [problem["line"] for problem in problems] == [6, 7]
    broken = client.post("/api/recipe", json={"text": "method: [\n"}).json()["problems"]
    assert broken[0]["line"] in (1, 2)


def test_saving_a_recipe(client, folder):
    body = {"path": "new/mine.yml", "text": "method: linear\n"}
    assert client.post("/api/recipe/save", json=body).json() == {"path": "new/mine.yml"}
    assert (folder / "new" / "mine.yml").read_text() == "method: linear\n"
    assert "already" in client.post("/api/recipe/save", json=body).json()["error"]
    assert client.post("/api/recipe/save", json=body | {"overwrite": True}).status_code == 200
    assert "ends in .yml" in client.post("/api/recipe/save", json=body | {"path": "mine.txt"}).json()["error"]


def test_a_study_with_its_winner(client):
    found = client.get("/api/study", params={"path": "study.sqlite"}).json()
    assert found["ended"]
    assert len(found["trials"]) == found["total"] == 10
    [winner] = found["winners"]
    assert winner["objectives"]["quiz"] == max(t["objectives"]["quiz"] for t in found["trials"])
    interval = winner["unseen"]["quiz"]
    assert interval["low"] <= interval["value"] <= interval["high"]


def test_a_study_runs_as_long_as_a_process_works_on_it(client, folder):
    def runs():
        return client.get("/api/study", params={"path": "study.sqlite"}).json()["running"]

    assert not runs()
    lock = Lock(folder / "study.sqlite", Disk())
    assert runs()
    lock.leave()  # as a killed process leaves it: the file is there, and nobody holds it
    assert not runs()
    assert lock.path.exists()


def test_a_study_on_a_file_system_without_locks_is_shown(client, folder, monkeypatch):
    def fail(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    (folder / ".study.sqlite.lock").touch()
    monkeypatch.setattr(fcntl, "flock", fail)
    assert not client.get("/api/study", params={"path": "study.sqlite"}).json()["running"]


def test_a_library_and_its_budgets(client, folder):
    found = client.get("/api/library", params={"path": "library"}).json()
    assert [expert["name"] for expert in found["experts"]] == ["math", "code"]
    budgets = client.get("/api/library/budgets", params={"path": "library"}).json()
    energies = [point["energy"]["math"] for point in budgets]
    assert energies == sorted(energies)
    assert energies[-1] == pytest.approx(found["experts"][0]["energy"], rel=1e-6)
    assert all(a["bytes"] <= b["bytes"] for a, b in itertools.pairwise(budgets))


def test_the_predicted_loss_is_what_a_build_with_that_budget_loses(tmp_path):
    """Of experts that their library holds whole: here low-rank ones, as plain factors; codes lose no more."""
    from merganser.library import Library
    from merganser.library.budgets import predict_budgets

    base = {**{f"layers.{i}.weight": torch.randn(24, 16) for i in range(4)}, "norm": torch.randn(16)}
    experts = {
        name: {key: t if t.dim() < 2 else t + torch.randn(24, 3) @ torch.randn(3, 16) for key, t in base.items()}
        for name in ("one", "two")
    }
    mg.save(base, tmp_path / "base")
    points = predict_budgets(Library.build(tmp_path / "base", experts, tmp_path / "whole"))
    for number in (0, 6, 9, 12, 24):
        budget = {"budget": points[number]["bytes"]}
        small = Library.build(tmp_path / "base", experts, tmp_path / f"small{number}", **budget, dtype="float32")
        for name, record in small.manifest.experts.items():
            assert record.energy == pytest.approx(points[number]["energy"][name], abs=1e-4)
        mixed = Library.build(tmp_path / "base", experts, tmp_path / f"mixed{number}", **budget)
        for name, record in mixed.manifest.experts.items():
            assert record.energy > points[number]["energy"][name] - 1e-3


def test_overlaps_of_a_matrix(client):
    name = "model.layers.0.mlp.up_proj.weight"
    body = {"base": "base", "experts": {"math": "math", "code": "code"}, "matrix": name}
    overlap = torch.tensor(client.post("/api/overlap", json=body).json()["overlap"])
    half = len(overlap) // 2
    assert torch.allclose(overlap[:half, :half], torch.eye(half), atol=1e-3)
    assert "did you mean" in client.post("/api/overlap", json=body | {"matrix": name[:-1]}).json()["error"]


def test_a_sentence_finds_its_experts(client):
    found = client.post("/api/route", json={"path": "library", "text": "w1 w2 w3"}).json()
    assert sum(found["weights"].values()) == pytest.approx(1, abs=1e-4)
    assert set(found["chosen"]) <= {"math", "code"}
    assert found["explained"]
    for layer in found["explained"].values():
        assert all(0 <= share <= 1 for share in layer.values())
    if len(found["explained"]) == 1:  # of one layer, the expert that explains most weighs most
        [layer] = found["explained"].values()
        assert max(layer, key=layer.get) == max(found["weights"], key=found["weights"].get)


@pytest.mark.parametrize(
    "path",
    [
        "/api/checkpoint?path=nothing",
        "/api/study?path=base",
        "/api/jobs/none",
        "/api/library?path=math",
        "/api/recipe?path=nothing.yml",
        "/api/recipe?path=base/model.safetensors",
    ],
)
def test_errors_are_sentences(client, path):
    found = client.get(path)
    assert found.status_code == 422
    assert not re.search("Traceback|Errno|codec", found.json()["error"])
    assert found.json()["error"]


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", f"base/{'x' * 300}"])
def test_a_name_that_no_file_can_have_is_called_so(client, name):
    found = client.get("/api/checkpoint", params={"path": name})
    assert found.status_code == 422
    assert "is not the name of a file" in found.json()["error"]
    assert len(found.json()["error"]) < 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/jobs", {"kind": "check", "values": {"path": 5}}),
        (
            "/api/jobs",
            {"kind": "library", "values": {"base": "base", "experts": ["math"], "out": "l", "budget": "all"}},
        ),
        ("/api/recipe/save", {"path": "recipe.yml/inside.yml", "text": "method: linear"}),
    ],
)
def test_values_that_cannot_be_used_are_refused(client, path, body):
    found = client.post(path, json=body)
    assert found.status_code == 422
    assert found.json()["error"]
