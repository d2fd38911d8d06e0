"""The server on loopback: right answers in company, clear refusals, and a quiet end."""

import asyncio
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from merganser.cli import build
from merganser.cli.serve import build_model, command, name_classes, read_heads, read_labels
from merganser.errors import InputError
from merganser.modules.inputs import Inputs
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.batching import Batcher, Busy, Closed, Limits
from merganser.routing.heads import NamedHead
from merganser.routing.requests import Refused, cast_inputs
from merganser.routing.routers import ProjectionRouter
from merganser.routing.serving import create_app
from support.expert_nets import WIDTH, heads_of, small_library
from support.servers import Running

fastapi = pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

TASKS = ("a", "b", "c")
LABELS = {"a": ["no", "yes"], "b": ["x", "y", "z"], "c": list("pqrs")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    base, library = small_library(tmp_path_factory.mktemp("serving"), TASKS)
    return AdaptiveModel(base, library, heads_of(TASKS), layer="blocks.1.up")


@pytest.fixture(scope="module")
def server(model):
    named = model.with_heads(name_classes(heads_of(TASKS), LABELS))
    with Running(create_app(named, limits=Limits(body_bytes=60_000, samples=8, wait=0.02))) as running:
        yield running


def test_answers_are_the_models_under_concurrent_load(server, model):
    torch.manual_seed(0)
    requests = [torch.randn(1 + index % 3, 2 + index % 2, WIDTH) for index in range(24)]
    expected = [model.predict(x) for x in requests]

    async def ask():
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            return await asyncio.gather(*(client.post("/predict", json={"inputs": x.tolist()}) for x in requests))

    for response, prediction in zip(asyncio.run(ask()), expected, strict=True):
        assert response.status_code == 200, response.text
        found = response.json()["predictions"]
        assert [answer["task"] for answer in found] == list(prediction.tasks)
        assert [answer["class"] for answer in found] == prediction.classes.tolist()
        assert [answer["label"] for answer in found] == [LABELS[a["task"]][a["class"]] for a in found]
        assert [set(answer["experts"]) for answer in found] == [set(chosen) for chosen in prediction.sets]
        torch.testing.assert_close(torch.tensor([a["score"] for a in found]), prediction.scores, atol=1e-4, rtol=1e-4)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'merganser_requests_total{path="/predict",status="200"} 24' in metrics
    batches = int(next(line for line in metrics.splitlines() if "batches_total" in line).split()[1])
    assert batches < 24, "concurrent requests share forward passes"


def test_routes_and_health(server, model):
    x = torch.randn(2, 3, WIDTH)
    found = httpx.post(f"{server.url}/route", json={"inputs": {"x": x.tolist()}}).json()["routes"]
    routing = model.route(x)
    for answer, chosen, weights in zip(found, routing.sets, routing.weights.tolist(), strict=True):
        assert set(answer["experts"]) == chosen
        assert list(answer["weights"].values()) == pytest.approx(weights)
    health = httpx.get(f"{server.url}/healthz")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "experts": list(TASKS)})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 5000, 400, "not JSON"),
        (b"[1]", 422, 'an object with "inputs"'),
        (b'{"inputs": [], "task": "a"}', 422, "unknown field 'task'"),
        (b'{"inputs": []}', 422, "0 samples"),
        (b'{"inputs": 3}', 422, "must be an array"),
        (b'{"inputs": [[1.0], [1.0, 2.0]]}', 422, "rectangular"),
        (b'{"inputs": [["a"]]}', 422, "rectangular"),
        (b'{"inputs": [[]]}', 422, "samples without numbers"),
        (b'{"inputs": [1.0, 2.0]}', 422, "does not accept a tensor of shape [2]"),
        (b'{"inputs": [[NaN]]}', 422, "infinite or NaN"),
        (b'{"inputs": [[[1.0, 2.0]]]}', 422, "does not accept a tensor of shape [1, 1, 2]"),
        (b'{"inputs": {"y": [[[1.0]]]}}', 422, "does not accept these inputs"),
        (b'{"inputs": {"x": [[1.0]], "y": [[1.0], [2.0]]}}', 422, "same number of samples"),
        (b'{"inputs": [' + b"[[0.0]]," * 8 + b"[[0.0]]]}", 422, "9 samples"),
        (b" " * 70_000, 413, "larger than 60000 bytes"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(server, body, status, message):
    response = httpx.post(f"{server.url}/predict", content=body)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_a_body_of_undeclared_length_is_cut_off(server):
    response = httpx.post(f"{server.url}/predict", content=(b" " * 10_000 for _ in range(8)))
    assert response.status_code == 413
    for path, status, message in (("predict", 405, "Method Not Allowed"), ("nothing", 404, "Not Found")):
        answer = httpx.get(f"{server.url}/{path}")
        assert (answer.status_code, answer.json()) == (status, {"error": message})


def test_the_description_is_complete_and_the_page_about_it_needs_no_network(server):
    jsonschema = pytest.importorskip("jsonschema")
    described = httpx.get(f"{server.url}/openapi.json").json()
    assert set(described["paths"]) == {"/predict", "/route", "/healthz", "/metrics"}
    schemas = described["components"]["schemas"]
    references = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described)))
    assert references == set(schemas), "every body is named, and every name is used"
    row = torch.randn(1, 2, WIDTH).tolist()
    for path, key in (("/predict", "predictions"), ("/route", "routes")):
        operation = described["paths"][path]["post"]
        assert operation["requestBody"]["required"]
        assert set(operation["responses"]) == {"200", "400", "401", "408", "413", "422", "500", "503", "504"}
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        schema = {**schema, "components": described["components"]}
        answered = httpx.post(f"{server.url}{path}", json={"inputs": row})
        jsonschema.validate(answered.json(), schema)
        assert set(answered.json()) == {key}
    jsonschema.validate({"inputs": row}, schemas["Request"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"input": row}, schemas["Request"])
    page = httpx.get(f"{server.url}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "POST /predict" in page.text
    assert not re.search(r"<script|https?://(?!HOST)", page.text)
    assert httpx.get(f"{server.url}/redoc").status_code == 404


def test_encoders_and_models_without_heads(model):
    bare = AdaptiveModel(model.module, model.library, layer="blocks.1.up")

    def spread(numbers):
        if numbers == ["bad"]:
            raise KeyError("bad")
        return torch.tensor(numbers)[:, None, None].expand(-1, 2, WIDTH).float()

    with Running(create_app(bare, encode=spread, limits=Limits(samples=4))) as running:
        found = httpx.post(f"{running.url}/predict", json={"inputs": [1, 2]}).json()["predictions"]
        expected = bare(spread([1, 2])).logits
        torch.testing.assert_close(torch.tensor([a["output"] for a in found]), expected, atol=1e-4, rtol=1e-4)
        assert httpx.post(f"{running.url}/predict", json={"inputs": ["bad"]}).status_code == 422
        assert httpx.post(f"{running.url}/predict", json={"inputs": [0] * 5}).status_code == 422


def test_requests_are_batches_of_their_own_where_a_batch_is_routed_as_one(model):
    alone = model.with_settings(per_batch=True, top=1)
    requests = [torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(16)]
    expected = [alone.route(x).sets[0] for x in requests]
    assert len(set(expected)) > 1

    async def ask(url):
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            return await asyncio.gather(*(client.post("/route", json={"inputs": x.tolist()}) for x in requests))

    with Running(create_app(alone, limits=Limits(wait=0.2))) as running:
        found = [set(response.json()["routes"][0]["experts"]) for response in asyncio.run(ask(running.url))]
    assert found == expected


def test_whole_numbers_are_features_unless_they_are_ids_or_a_mask(server, model):
    whole = torch.arange(2 * 3 * WIDTH).reshape(2, 3, WIDTH) % 5
    for inputs in (whole.tolist(), {"x": whole.tolist()}):
        response = httpx.post(f"{server.url}/predict", json={"inputs": inputs})
        assert response.status_code == 200, response.text
        assert [answer["task"] for answer in response.json()["predictions"]] == list(model.predict(whole.float()).tasks)

    half = torch.nn.Linear(2, 2).bfloat16()
    given = Inputs((torch.ones(1, 2, dtype=torch.long),), {"attention_mask": torch.ones(1, 2, dtype=torch.long)})
    found = cast_inputs(given, half)
    assert (found.args[0].dtype, found.kwargs["attention_mask"].dtype) == (torch.bfloat16, torch.long)
    reader = torch.nn.Sequential(torch.nn.Embedding(3, 2), half)
    assert cast_inputs(given, reader).args[0].dtype == torch.long
    assert cast_inputs(Inputs((torch.ones(1, 2),)), half).args[0].dtype == torch.bfloat16
    assert cast_inputs(given, torch.nn.ReLU()) is given
    with pytest.raises(Refused, match="inputs.x has entries that torch.float16 cannot hold"):
        cast_inputs(Inputs((), {"x": torch.tensor([[70_000.0]])}), torch.nn.Linear(1, 1).half())


def test_numbers_that_json_does_not_have_are_null(model):
    heads = {task: (lambda z: torch.full((len(z), 2), torch.inf)) for task in TASKS}
    loud = AdaptiveModel(
        model.module, model.library, layer="blocks.1.up", features=lambda output, inputs: output * torch.inf
    )
    for served, key in ((loud, "output"), (model.with_heads(heads), "score")):
        with Running(create_app(served)) as running:
            response = httpx.post(f"{running.url}/predict", json={"inputs": torch.ones(1, 2, WIDTH).tolist()})
        assert response.status_code == 200, response.text
        found = response.json()["predictions"][0][key]
        assert found is None or found == [None] * WIDTH


def test_labels_have_to_fit_the_heads(model):
    with pytest.raises(InputError, match="names for 'z', which is not an expert"):
        name_classes(heads_of(TASKS), {"z": ["no"]})
    with pytest.raises(InputError, match="the head of 'a' has 2 classes, but 1 names"):
        model.with_heads(name_classes(heads_of(TASKS), {"a": ["no"]}))


@pytest.mark.parametrize("text", ['["no"]', '{"a": "no"}', '{"a": [0, 1]}', "{"])
def test_labels_are_lists_of_names(text, tmp_path):
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(InputError, match=r"labels\.json: "):
        read_labels(tmp_path / "labels.json")


def test_the_command_line_names_classes(model, tmp_path):
    """Heads whose classes have the same names answer one question, as from Python."""
    heads = {task: {"weight": torch.randn(2, WIDTH), "bias": torch.randn(2)} for task in TASKS}
    (tmp_path / "heads").mkdir()
    for task, head in heads.items():
        save_file(head, tmp_path / "heads" / f"{task}.safetensors")
    labels = {"a": ["no", "yes"], "c": ["no", "yes"]}
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    built = build_model(
        model.library.path,
        "support.expert_nets:encoder",
        tmp_path / "heads",
        None,
        labels=tmp_path / "labels.json",
        layer=["blocks.1.up"],
        score="posterior",
    ).with_router(model.router)
    named = {task: NamedHead(head, labels[task]) if task in labels else head for task, head in heads.items()}
    plain = model.with_heads(heads).with_settings(score="posterior")
    x = torch.randn(9, 2, WIDTH)
    assert torch.equal(built.predict(x).scores, plain.with_heads(named).predict(x).scores)
    assert not torch.allclose(built.predict(x).scores, plain.predict(x).scores)
    with pytest.raises(InputError, match="give them with --heads"):
        build_model(model.library.path, "support.expert_nets:encoder", None, None, labels=tmp_path / "labels.json")


def one(value):
    return Inputs((torch.full((1, 1), float(value)),))


def test_a_failing_job_spoils_no_other():
    def work(inputs):
        values = inputs.args[0][:, 0].tolist()
        if 13 in values:
            raise ValueError("unlucky")
        return [{"value": value} for value in values]

    async def main():
        batcher = Batcher({"w": work}, Limits(wait=0.01))
        batcher.start()
        results = await asyncio.gather(*(batcher.submit("w", one(v)) for v in (1, 13, 2)), return_exceptions=True)
        await batcher.stop()
        with pytest.raises(Closed):
            await batcher.submit("w", one(1))
        return results

    first, bad, second = asyncio.run(main())
    assert (first, second) == ([{"value": 1.0}], [{"value": 2.0}])
    assert isinstance(bad, ValueError)


def test_limits_of_the_queue_and_of_time_and_draining():
    gate = threading.Event()
    sizes = []

    def work(inputs):
        gate.wait(10)
        sizes.append(inputs.size)
        return [{}] * inputs.size

    async def main():
        batcher = Batcher({"w": work}, Limits(batch=2, queue=3, wait=0, timeout=5))
        batcher.start()
        jobs = [asyncio.create_task(batcher.submit("w", one(0)))]
        await asyncio.sleep(0.05)
        jobs += [asyncio.create_task(batcher.submit("w", one(v))) for v in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(Busy):
            await batcher.submit("w", one(9))
        stopping = asyncio.create_task(batcher.stop())
        gate.set()
        assert len(await asyncio.gather(*jobs)) == 4, "what waits is answered before the end"
        await stopping
        slow = Batcher({"w": lambda _: time.sleep(0.3) or [{}]}, Limits(timeout=0.05, wait=0))
        slow.start()
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            await slow.submit("w", one(1))
        await slow.stop()

    asyncio.run(main())
    assert sizes == [1, 2, 1]
    for bad in ({"batch": 0}, {"timeout": 0.0}, {"wait": -1.0}):
        with pytest.raises(InputError):
            Limits(**bad)


def test_a_timeout_is_told(model):
    slow = AdaptiveModel(model.module, model.library, layer="blocks.1.up")
    with Running(create_app(slow, encode=lambda _: torch.zeros(1, 2, WIDTH), limits=Limits(timeout=1e-4))) as running:
        response = httpx.post(f"{running.url}/predict", json={"inputs": [1]})
        assert response.status_code in (408, 504)
        assert "seconds" in response.json()["error"]


def write_heads(directory: Path):
    directory.mkdir()
    for task, head in heads_of(TASKS).items():
        save_file(head, directory / f"{task}.safetensors")
    return directory


def test_the_command_line_builds_the_model(model, tmp_path):
    heads = write_heads(tmp_path / "heads")
    built = build_model(
        model.library.path, "support.expert_nets:encoder", heads, None, features=None, layer=["blocks.1.up"]
    )
    x = torch.randn(3, 2, WIDTH)
    built = built.with_router(model.router)
    assert built.predict(x).tasks == model.predict(x).tasks
    with pytest.raises(InputError, match="no head for 'z'"):
        read_heads(heads, ("a", "z"))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("def make():\n    raise KeyError('MODEL_DIR')", "the factory failed with KeyError"),
        ("def make():\n    from torch.nn import Linear\n    return Linear", "expected an nn.Module"),
        ("def make(width):\n    return None", "the factory failed with TypeError"),
    ],
)
def test_factories_that_give_no_network_are_named(model, tmp_path, monkeypatch, factory, message):
    name = f"factory_{abs(hash(factory))}"
    (tmp_path / f"{name}.py").write_text(factory)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=message):
        build_model(model.library.path, f"{name}:make", None, None, features=None)


def test_names_of_the_command_are_checked(model):
    options = [str(model.library.path), "--model", "support.expert_nets:encoder", "--layer", "blocks.1.up"]
    wrong = (
        ("--source", "source", "bse"),
        ("--normalize", "normalize", "zscores"),
        ("--head-score", "score", "logits"),
    )
    for option, name, value in wrong:
        result = CliRunner().invoke(build(), ["serve", *options, option, value])
        assert isinstance(result.exception, InputError)
        assert f"{name} {value!r}; did you mean" in str(result.exception)


def test_the_command_has_the_defaults_of_the_model():
    ours, model, router = (inspect.signature(of).parameters for of in (command, AdaptiveModel, ProjectionRouter))
    theirs = {**model, **router}  # None in the model stands for what the router has
    shared = [name for name in ours if name in theirs and name not in ("library", "heads", "features", "layer")]
    assert set(shared) >= {"source", "normalize", "score", "threshold", "top", "redundancy"}
    assert {name: ours[name].default for name in shared} == {name: theirs[name].default for name in shared}


def test_the_command_serves_and_ends_on_request(model, tmp_path):
    heads = write_heads(tmp_path / "heads")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = textwrap.dedent("""
        import typer
        from merganser.cli.serve import command
        typer.run(command)
    """)
    arguments = [str(model.library.path), "--model", "support.expert_nets:encoder", "--heads", str(heads)]
    arguments += ["--layer", "blocks.1.up", "--port", str(port), "--timeout", "5", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        for _ in range(600):
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
                break
            except httpx.TransportError:
                assert process.poll() is None, process.stderr.read().decode()
                time.sleep(0.1)
        x = torch.randn(2, 3, WIDTH)
        found = httpx.post(f"http://127.0.0.1:{port}/predict", json={"inputs": x.tolist()}).json()["predictions"]
        assert [answer["task"] for answer in found] == list(model.predict(x).tasks)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert b"Traceback" not in process.stderr.read()
        event = json.loads(process.stdout.read())
        assert event == {"event": "serving", "url": f"http://127.0.0.1:{port}", "experts": list(model.library.experts)}
    finally:
        process.kill()
        process.wait()
