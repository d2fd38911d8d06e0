"""Merges of adapters on a server: what it loads is the merge of the recipe, and nothing stays loaded."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merganser.errors import InputError, MerganserError
from merganser.evaluate.endpoints import Server
from merganser.evaluate.examiners import MultipleChoice
from merganser.evolve import loading
from merganser.evolve.runs import recipe, start
from merganser.evolve.served import ServedAdapters

QUIZ = [{"question": f"q{i}", "options": ["yes", "no"], "answer": i % 2} for i in range(20)]


class Stub(BaseHTTPRequestHandler):
    """Speaks vLLM's protocol: loads adapters, and scores options by the sum of the update it has loaded."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, reply = self.server.handle_path(self.path, body)
        content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


class Served(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Stub)
        self.loaded, self.updates, self.failing, self.adapters = {}, [], False, True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_path(self, path, body):
        name = body.get("lora_name")
        if name and not self.adapters:
            return 404, {"detail": "Not Found"}
        if path == "/v1/load_lora_adapter":
            self.loaded[name] = update(Path(body["lora_path"]))
            self.updates.append(self.loaded[name])
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        if path == "/v1/unload_lora_adapter":
            del self.loaded[name]
            return 200, f"Success: LoRA adapter '{name}' removed successfully."
        if self.failing:
            return 400, {"error": "no"}
        change = float(self.loaded[body["model"]].sum()) if body["model"] != "tiny" else 0.0
        start = body["prompt"].rindex(" ")
        liked = change if body["prompt"].endswith("yes") else -change
        return 200, {
            "choices": [{"text": "", "logprobs": {"token_logprobs": [None, liked], "text_offset": [0, start]}}]
        }


def update(folder):
    """B·A·alpha/r, from the files that PEFT reads."""
    tensors, config = load_file(folder / "adapter_model.safetensors"), (folder / "adapter_config.json").read_text()
    a, b = (tensors[f"base_model.model.layer.lora_{each}.weight"].double() for each in "AB")
    return b @ a * (json.loads(config)["lora_alpha"] / a.shape[0])


@pytest.fixture
def served():
    server = Served()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def adapters(tmp_path):
    generator = torch.Generator().manual_seed(0)
    save_file({"layer.weight": torch.randn(6, 4, generator=generator)}, tmp_path / "base.safetensors")
    for name, rank in (("math", 2), ("code", 1)):
        (tmp_path / name).mkdir()
        shapes = {"A": (rank, 4), "B": (6, rank)}
        tensors = {
            f"base_model.model.layer.lora_{each}.weight": torch.randn(shape, generator=generator)
            for each, shape in shapes.items()
        }
        save_file(tensors, tmp_path / name / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["layer"]}
        config["base_model_name_or_path"] = str(tmp_path / "base.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "quiz.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in QUIZ))
    return {name: str(tmp_path / name) for name in ("math", "code")}


def test_the_server_loads_exactly_the_weighted_sum(served, adapters):
    evaluate = ServedAdapters(Server(served.url, "tiny"), adapters, {"quiz": MultipleChoice(QUIZ, "")})
    values = {"weight.math": 0.3, "weight.code": -0.7}
    answers = evaluate(values, {"quiz": [0, 1, 2, 3]})
    own = [update(Path(path)) for path in adapters.values()]
    torch.testing.assert_close(served.updates[-1], 0.3 * own[0] - 0.7 * own[1], rtol=1e-5, atol=1e-6)
    rises = float(served.updates[-1].sum()) > 0
    assert answers["quiz"] == [float((i % 2 == 0) == rises) for i in range(4)]
    assert set(answers) == {"quiz", "quiz.soft"}
    evaluate("code", {"quiz": [0]})
    assert torch.equal(served.updates[-1], own[1])
    assert evaluate("base", {"quiz": [0]})["quiz.soft"] == [0.5]
    assert len(served.updates) == 2, "the base needs no adapter"
    assert served.loaded == {}


def test_nothing_stays_loaded_when_asking_fails(served, adapters):
    served.failing = True
    evaluate = ServedAdapters(Server(served.url, "tiny"), adapters, {"quiz": MultipleChoice(QUIZ, "")})
    with pytest.raises(MerganserError, match="status 400"):
        evaluate("math", {"quiz": [0]})
    assert served.loaded == {}
    with pytest.raises(InputError, match="no endpoint 'maths'; there are math, code"):
        evaluate("maths", {"quiz": [0]})


RUN = """
base: ./base.safetensors
models: {math: ./math, code: ./code}
method: task_arithmetic
space: {weight: {low: -1, high: 1, per: model}}
tasks: {quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 4}}
objectives: [quiz.soft]
search: {algorithm: random, population: 5, generations: 1, rerank: 0}
model: {kind: server, path: "URL#tiny"}
"""


def test_a_server_that_loads_no_adapters_is_told_from_a_broken_one(served, adapters):
    served.adapters = False
    server = Server(served.url, "tiny")
    with pytest.raises(InputError, match="this server loads no adapters while it runs"):
        server.load_adapter("x", adapters["math"])


def test_a_study_on_a_server_and_the_recipe_of_its_winner(served, adapters, tmp_path):
    (tmp_path / "run.yml").write_text(RUN.replace("URL", served.url))
    with start(tmp_path / "run.yml", tmp_path / "s.sqlite") as study:
        winner = study.best()
        assert {t.state for t in study.trials()} == {"done"}
        assert study.test_scores("base") == {"quiz": pytest.approx(0.5, abs=0.5), "quiz.soft": 0.5}
        merged = recipe(study, winner)
        assert [model["weight"] for model in merged["models"]] == list(winner.values.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("method: task_arithmetic", "method: ties"), "a server loads weighted sums of adapters"),
        (("per: model}", "per: merge}"), "search one weight per model"),
        (("models: {math: ./math", "models: {math: ./base.safetensors"), "is not a LoRA adapter"),
        (("kind: multiple-choice", "kind: perplexity"), "a server only answers texts"),
        (("URL#tiny", "somewhere"), "expected the address of a server"),
    ],
)
def test_what_a_server_cannot_merge_is_refused(adapters, tmp_path, change, message):
    assert change[0] in RUN
    (tmp_path / "run.yml").write_text(RUN.replace(*change))
    with pytest.raises(MerganserError) as caught:
        loading.load(tmp_path / "run.yml")
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
