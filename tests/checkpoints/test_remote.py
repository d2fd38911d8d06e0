"""Models read by ranges from a server that is slow, forgetful or broken, against the same models on disk."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.remote import files, models, read_ahead, retrying, tensors
from merganser.errors import CheckpointError, InputError, MerganserError
from support.locked_models import make_models
from support.range_server import RangeServer
from support.sentence_models import sentence_model

FIRST = 512
LOOK = f"bytes=0-{FIRST - 1}"


@pytest.fixture(autouse=True, scope="module")
def connections() -> Iterator[None]:
    yield
    if files._client.cache_info().currsize:
        files._client(os.getpid()).close()
        files._client.cache_clear()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pauses, files that are larger than a first look, and nothing remembered from one test in the next."""
    monkeypatch.setattr(retrying, "PAUSE", 0.001)
    monkeypatch.setattr(files, "FIRST", FIRST)
    monkeypatch.setattr(tensors, "FIRST", FIRST)
    yield
    models.fetch_small_files.cache_clear()
    read_ahead._of_process.cache_clear()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    make_models(tmp_path / "served")
    monkeypatch.chdir(tmp_path)
    with RangeServer(tmp_path / "served") as running:
        yield running


def merge(server: RangeServer | None, out: str, method: str = "ties", **options) -> Path:
    place = server.url if server else "served"
    recipe = {"method": method, "base": f"{place}/base", "models": [f"{place}/math", f"{place}/code"]}
    return mg.run(recipe, out, **options)


def make_adapter(adapter: Path) -> None:
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["layers.0"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    factors = {"A": torch.randn(2, 8), "B": torch.randn(8, 2)}
    named = {f"base_model.model.layers.0.lora_{key}.weight": value for key, value in factors.items()}
    save_file(named, adapter / "adapter_model.safetensors")


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_the_same_bytes_as_from_disk(server: RangeServer) -> None:
    assert weights(merge(server, "remote")) == weights(merge(None, "local"))
    lock, local = (mg.origin.read_lock(out) for out in ("remote", "local"))
    assert lock.digest == "sha256"
    assert lock.outputs == local.outputs
    for name in ("base", "math", "code"):
        expected = local.sources[f"served/{name}/model.safetensors"]
        assert lock.sources[f"{server.url}/{name}/model.safetensors"] == expected
    assert [model.licence for model in lock.models] == ["mit", "apache-2.0", "cc-by-sa-4.0"]
    assert mg.origin.rebuild("remote").problems == ()


def test_nothing_is_read_twice_and_nothing_kept(server: RangeServer, tmp_path: Path, monkeypatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    merge(server, "out")
    asked = [each for each in server.requests if each[0].endswith(".safetensors")]
    assert len(asked) == len(set(asked)) <= 3 * (4 + 2)  # a first look, what else the header has, every tensor
    assert not list(scratch.rglob("*.safetensors"))


def test_opening_reads_headers_only(server: RangeServer, tmp_path: Path) -> None:
    save_file({"w": torch.randn(1 << 20)}, tmp_path / "served/large.safetensors")
    checkpoint = mg.open(f"{server.url}/large.safetensors")
    assert checkpoint.spec("w").shape == (1 << 20,)
    assert server.sent < 1 << 18
    assert torch.equal(checkpoint.read("w", (3, 9)), mg.open("served/large.safetensors").read("w", (3, 9)))


def test_shards_and_long_headers(server: RangeServer, tmp_path: Path) -> None:
    place = tmp_path / "served/sharded"
    place.mkdir()
    names = [f"layer.{i}.{'x' * 100}" for i in range(1000)]
    for shard in range(2):
        save_file({name: torch.full((2,), float(shard)) for name in names[shard::2]}, place / f"s{shard}.safetensors")
    index = {"weight_map": {name: f"s{i % 2}.safetensors" for i, name in enumerate(names)}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = mg.open(f"{server.url}/sharded")
    assert sorted(checkpoint) == sorted(names)
    assert checkpoint.read(names[7]).tolist() == [1.0, 1.0]


def sharded(place: Path, names: str = "ab") -> dict[str, str]:
    """A model of three shards whose index names those of some tensors only."""
    place.mkdir()
    files = {name: f"model-{i:05d}-of-00003.safetensors" for i, name in enumerate("abc", 1)}
    for value, (name, file) in enumerate(files.items()):
        save_file({name: torch.full((2,), float(value))}, place / file)
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: files[name] for name in names}})
    )
    return files


def test_one_file_comes_before_an_index_as_in_transformers(server: RangeServer, tmp_path: Path) -> None:
    sharded(tmp_path / "served/both")
    save_file({"whole": torch.ones(2)}, tmp_path / "served/both/model.safetensors")
    for place in (server.url, "served"):
        assert list(mg.open(f"{place}/both")) == ["whole"]


def test_shards_that_an_index_leaves_out_are_noted(server: RangeServer, tmp_path: Path) -> None:
    sharded(tmp_path / "served/some")
    sharded(tmp_path / "served/all", "abc")
    for place in (server.url, "served"):
        plan = mg.recipes.plan(mg.recipes.load({"method": "linear", "models": [f"{place}/some"] * 2}))
        (note,) = [note for note in plan.notes if "index" in note]
        assert note.startswith(f"{place}/some: the index names 2 of the 3 files model-…-of-00003.safetensors")
        assert not mg.open(f"{place}/all").notes()


def test_an_index_that_lies(server: RangeServer, tmp_path: Path) -> None:
    files = sharded(tmp_path / "served/lies")
    index = {"weight_map": {"a": files["a"], "b": files["a"]}}
    (tmp_path / "served/lies/model.safetensors.index.json").write_text(json.dumps(index))
    for place in (server.url, "served"):
        with pytest.raises(CheckpointError, match="says 'b' is in model-00001-of-00003.safetensors, which has no such"):
            mg.open(f"{place}/lies")


@pytest.mark.parametrize("pickled", [False, True])
def test_modules_of_sentence_transformers(server: RangeServer, tmp_path: Path, pickled: bool) -> None:
    for name, value in (("a", 1.0), ("b", 3.0)):
        sentence_model(tmp_path / "served" / name, value, pickled)
        (tmp_path / "served" / name / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    outs = {
        place: mg.run({"method": "linear", "models": [f"{place}/a", f"{place}/b"]}, f"out-{i}", digest="sha256")
        for i, place in enumerate((server.url, "served"))
    }
    remote, local = outs.values()
    written = {path.relative_to(local) for path in local.rglob("*") if path.is_file()}
    assert {path.relative_to(remote) for path in remote.rglob("*") if path.is_file()} == written
    assert Path("2_Dense/model.safetensors") in written
    for name in written - {Path(each) for each in ("README.md", "recipe.yml", "merganser.lock.json")}:
        assert (remote / name).read_bytes() == (local / name).read_bytes(), name
    dense = "2_Dense/pytorch_model.bin" if pickled else "2_Dense/model.safetensors"
    lock, expected = (mg.origin.read_lock(out) for out in outs.values())
    assert lock.sources[f"{server.url}/a/{dense}"] == expected.sources[f"served/a/{dense}"]
    assert mg.origin.rebuild(remote).problems == ()


def test_a_merge_of_remote_files_copies_the_modules(server: RangeServer, tmp_path: Path) -> None:
    models = [sentence_model(tmp_path / "served" / name, value).name for name, value in (("a", 1.0), ("b", 3.0))]
    document = {"method": "linear", "models": [f"{server.url}/{name}/model.safetensors" for name in models]}
    assert any("is copied unchanged" in note for note in mg.recipes.plan(mg.recipes.load(document)).notes)
    out = mg.run(document, "out")
    dense = Path("2_Dense/model.safetensors")
    assert (out / dense).read_bytes() == (tmp_path / "served/a" / dense).read_bytes()


def sometimes(fault: str, every: int, suffix: str = "") -> Callable[[int, str], str]:
    """Go wrong in every so many requests for one file: however requests interleave, none fails for ever."""
    asked: Counter[str] = Counter()

    def decide(number: int, path: str) -> str:
        asked[path] += 1
        return fault if asked[path] % every == 0 and path.endswith(suffix) else ""

    return decide


FAULTS = {"busy": ("503", 3), "cut": ("cut", 3, ".safetensors"), "dropped": ("drop", 4), "too many": ("429", 3)}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_that_pass_change_nothing(server: RangeServer, fault: str) -> None:
    server.fault = sometimes(*FAULTS[fault])
    assert weights(merge(server, "remote")) == weights(merge(None, "local"))


def test_a_merge_goes_on_after_the_server_was_gone(server: RangeServer) -> None:
    opened: list[int] = []

    def gone(number: int, path: str) -> str:
        if path.endswith(".safetensors"):
            opened.append(number)
        return "503" if len(opened) > 8 else ""

    server.fault = gone
    with pytest.raises(MerganserError, match="the server says 503, 6 times in a row.*resume=True") as caught:
        merge(server, "out", workers=1)
    assert not isinstance(caught.value, InputError)
    assert Path("out.partial").is_dir()
    server.fault = lambda number, path: ""
    assert weights(merge(server, "out", resume=True)) == weights(merge(None, "local"))
    assert mg.origin.verify("out").problems == ()


def test_a_merge_with_an_adapter_goes_on_in_another_process(server: RangeServer, tmp_path: Path) -> None:
    """The adapter is downloaded again, to another directory."""
    make_adapter(tmp_path / "served/adapter")
    opened: list[int] = []

    def gone(number: int, path: str) -> str:
        if path.endswith("model.safetensors"):
            opened.append(number)
        return "503" if len(opened) > 8 else ""

    def merge(place: str, out: str, **options) -> Path:
        adapted = f"{place}/base+{place}/adapter"
        return mg.run({"method": "linear", "models": [adapted, f"{place}/math", f"{place}/code"]}, out, **options)

    server.fault = gone
    with pytest.raises(MerganserError, match="resume=True"):
        merge(server.url, "out", workers=1)
    assert Path("out.partial").is_dir()
    server.fault = lambda number, path: ""
    models.fetch_small_files.cache_clear()
    assert weights(merge(server.url, "out", resume=True)) == weights(merge("served", "local"))


def test_a_file_that_changes_meanwhile(server: RangeServer) -> None:
    versions = iter(range(10**6))

    def etag(number: int) -> str:
        path, asked = server.requests[number]
        later = path.endswith(".safetensors") and asked != LOOK and next(versions) > 4
        return '"two"' if later else '"one"'

    server.etag = etag
    with pytest.raises(CheckpointError, match="changed while it was read"):
        merge(server, "out")
    assert not list(Path().glob("out*"))


def test_a_file_that_shrinks_meanwhile(server: RangeServer, tmp_path: Path) -> None:
    checkpoint = mg.open(f"{server.url}/math")
    file = tmp_path / "served/math/model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.read("norm.weight")


def test_a_server_without_ranges(server: RangeServer) -> None:
    server.ranges = False
    with pytest.raises(CheckpointError, match="math/model.safetensors: the server does not support range requests"):
        mg.open(f"{server.url}/math")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no model.safetensors and no index"),
        ("nothing.safetensors", "nothing.safetensors: no such file"),
        ("math/config.json.safetensors", "no such file"),
    ],
)
def test_what_is_not_there(server: RangeServer, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        mg.open(f"{server.url}/{name}")


def test_what_is_no_safetensors_file(server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "served/bad.safetensors").write_bytes(b"\xff" * 50)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        mg.open(f"{server.url}/bad.safetensors")
    (tmp_path / "served/empty.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="the file is empty"):
        mg.open(f"{server.url}/empty.safetensors")


def test_a_server_that_is_not_there(server: RangeServer) -> None:
    server.__exit__()
    with pytest.raises(CheckpointError, match="no connection .*, 4 times in a row; is the address right?"):
        mg.open(f"{server.url}/math")


def test_hub_models_that_cannot_be_had(monkeypatch) -> None:
    pytest.importorskip("huggingface_hub")
    from merganser.checkpoints.opening import open_headers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="org/name: no such path, and not available from the hub"):
        open_headers("org/name")


def test_forbidden(server: RangeServer) -> None:
    server.fault = lambda number, path: "403" if path.endswith(".safetensors") else ""
    with pytest.raises(CheckpointError, match="the server says 403: reading it needs other credentials"):
        mg.open(f"{server.url}/math")


@pytest.mark.parametrize("url", ["https://me:secret@host/m", "https://host/m?X-Signature=secret", "file:///etc/m"])
def test_addresses_with_secrets_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        mg.open(url)
    assert "secret" not in str(caught.value)


def test_small_files_have_a_limit(server: RangeServer, monkeypatch) -> None:
    monkeypatch.setattr(models, "_LARGEST", 1)
    with pytest.raises(CheckpointError, match="more than the limit of 1 for a file beside the weights"):
        mg.open(f"{server.url}/math")


def test_adapters_and_sidecars_from_elsewhere(server: RangeServer, tmp_path: Path) -> None:
    make_adapter(tmp_path / "served/adapter")
    remote = mg.save(f"{server.url}/base+{server.url}/adapter", "remote")
    assert weights(remote) == weights(mg.save("served/base+served/adapter", "local"))
    (model,) = mg.origin.read_lock(remote).models
    assert [each.label for each in model.made_of] == [f"{server.url}/base", f"{server.url}/adapter"]
    assert (remote / "config.json").read_text() == "{}"
    with pytest.raises(CheckpointError, match=f"write BASE[+]{server.url}/adapter"):
        mg.open(f"{server.url}/adapter")
    config = json.loads((tmp_path / "served/adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"{server.url}/base"
    (tmp_path / "served/adapter/adapter_config.json").write_text(json.dumps(config))
    models.fetch_small_files.cache_clear()
    assert mg.open(f"{server.url}/adapter").label == f"{server.url}/base+{server.url}/adapter"


def test_room_bounds_what_is_held_ahead(server: RangeServer, monkeypatch) -> None:
    monkeypatch.setattr(read_ahead, "ROOM", 400)
    monkeypatch.setattr(read_ahead, "CHUNK", 100)
    assert weights(merge(server, "remote", workers=2)) == weights(merge(None, "local"))


def test_plans_read_headers_and_samples(server: RangeServer, monkeypatch, capsys) -> None:
    from merganser.cli import main

    place = server.url
    recipe = {"method": "ties", "base": f"{place}/base", "models": [f"{place}/math", f"{place}/code"]}
    Path("recipe.yml").write_text(json.dumps(recipe))
    monkeypatch.setattr("sys.argv", ["merganser", "plan", "recipe.yml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)
    told = capsys.readouterr().out
    assert "download" in told
    assert f"{place}/math" in told
    assert "licences mit, apache-2.0, cc-by-sa-4.0" in told
    assert "sampled" in told
    asked = Counter(each[0] for each in server.requests if each[0].endswith(".safetensors"))
    assert set(asked.values()) <= {3, 4}  # the header, by one request or two, and a piece of each of two matrices


class TestStores:
    """The way of `s3://`, `gs://` and `hf://`, with fsspec's file system in memory in their place."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        fsspec = pytest.importorskip("fsspec")
        make_models(tmp_path / "served")
        monkeypatch.chdir(tmp_path)
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
        memory.put(str(tmp_path / "served"), "/bucket", recursive=True)
        return memory

    def test_the_same_bytes_as_from_disk(self, store) -> None:
        recipe = {"method": "linear", "models": ["memory://bucket/math", "memory://bucket/code"]}
        local = mg.run({"method": "linear", "models": ["served/math", "served/code"]}, "local")
        assert weights(mg.run(recipe, "remote")) == weights(local)

    def test_modules_of_sentence_transformers(self, store, tmp_path: Path) -> None:
        model = sentence_model(tmp_path / "a", 1.0)
        store.put(str(model), "/bucket/a", recursive=True)
        remote, local = mg.save("memory://bucket/a", "remote"), mg.save(model, "local")
        for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "model.safetensors"):
            assert (remote / name).read_bytes() == (local / name).read_bytes()

    def test_a_file_that_is_replaced(self, store) -> None:
        checkpoint = mg.open("memory://bucket/math")
        store.pipe_file("/bucket/math/model.safetensors", store.cat_file("/bucket/code/model.safetensors"))
        with pytest.raises(CheckpointError, match="changed while it was read"):
            checkpoint.read("norm.weight")

    def test_what_is_not_there(self, store) -> None:
        with pytest.raises(CheckpointError, match="memory://bucket/nothing"):
            mg.open("memory://bucket/nothing")

    def test_short_answers_are_asked_for_again(self, store, monkeypatch) -> None:
        whole, calls = type(store).cat_file, []

        def cut(self, path, start=None, end=None, **options):
            calls.append(path)
            found = whole(self, path, start, end, **options)
            if len(calls) % 2:
                raise OSError("reset by peer")
            return found

        monkeypatch.setattr(type(store), "cat_file", cut)
        assert torch.equal(mg.open("memory://bucket/math")["norm.weight"], mg.open("served/math")["norm.weight"])


def test_models_of_the_hub(tmp_path: Path, monkeypatch) -> None:
    """By the hub's own client, from a server that answers as the hub does."""
    hub = pytest.importorskip("huggingface_hub")
    from merganser.checkpoints.opening import open_headers

    make_models(tmp_path / "org")
    home = tmp_path / "org/math"
    content = {path.name: path.read_bytes() for path in home.iterdir()}
    (home / "resolve/main").mkdir(parents=True)
    for name, each in content.items():
        (home / "resolve/main" / name).write_bytes(each)
    about = {
        "id": "org/math",
        "sha": "a" * 40,
        "siblings": [],
        "private": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
    }
    tree = [{"type": "file", "path": name, "size": len(each), "oid": "b" * 40} for name, each in content.items()]

    def answer(path: str, body: bytes) -> str | None:
        if path.startswith("/api/models/org/math/tree"):
            return json.dumps(tree)
        return json.dumps(about) if path.startswith("/api/models/org/math") else None

    with RangeServer(tmp_path) as server:
        server.answer = answer
        monkeypatch.setattr(hub.constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.HfFileSystem.clear_instance_cache()
        monkeypatch.chdir(tmp_path / "org/base")
        assert sorted(open_headers("org/math")) == ["embed.weight", "layers.0.weight", "norm.weight", "steps"]
        asked = [each for each in server.requests if each[0].endswith(".safetensors")]
        assert len(asked) <= 2
        out = mg.run({"method": "linear", "models": ["hf://org/math", "../code"]}, "out")
        model = mg.origin.read_lock(out).models[0]
        assert (model.repository, model.licence) == ("org/math", "apache-2.0")
        assert "base_model:\n- org/math\n" in (out / "README.md").read_text()
        assert server.sent < 3 * len(content["model.safetensors"])
    hub.HfFileSystem.clear_instance_cache()
    assert weights(out) == weights(mg.run({"method": "linear", "models": ["../math", "../code"]}, "local"))
