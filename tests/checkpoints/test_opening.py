from __future__ import annotations

import gc
import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import merganser as mg
from merganser.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def sharded(directory: Path, index: dict[str, str] | None = None) -> Path:
    directory.mkdir()
    save_file({"a": torch.ones(2)}, directory / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, directory / "model-2.safetensors")
    weight_map = index or {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_a_sharded_directory_is_one_checkpoint(tmp_path: Path) -> None:
    opened = mg.open(sharded(tmp_path / "m"))
    assert opened.names() == ["a", "b"]
    assert torch.equal(opened.read("b"), torch.zeros(3))
    assert "a" in opened
    assert "c" not in opened


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "m")
    save_file({"a": torch.full((2,), 5.0)}, directory / "model.safetensors")
    assert list(mg.open(directory).names()) == ["a"]
    assert mg.open(directory).read("a").tolist() == [5.0, 5.0]
    named = mg.open(directory / "model.safetensors.index.json")
    assert set(named.names()) == {"a", "b"}
    assert named.directory == directory


def test_names_and_aliases_are_made_once(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "m")
    for place in (directory, directory / "model-1.safetensors"):
        opened = mg.open(place)
        assert opened.names() is opened.names()
        assert opened.aliases() is opened.aliases()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a": "../model-1.safetensors"}, "weight_map: '../model-1.safetensors' is not the name of a file inside"),
        ({"a": "/etc/passwd"}, "weight_map: '/etc/passwd' is not the name of a file inside"),
        ({"a": "model-3.safetensors"}, "does not exist; is the download complete"),
        ({"a": 1}, "weight_map: expected the name of a file, got 1"),
        ({"a": None}, "weight_map: expected the name of a file, got None"),
        ({"a": ["model-1.safetensors"]}, "weight_map: expected the name of a file, got "),
        ({"c": "model-1.safetensors"}, "says 'c' is in model-1.safetensors, which has no such tensor"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, index: dict[str, str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        mg.open(sharded(tmp_path / "m", index))


def test_some_shards_without_their_index_are_not_a_model(tmp_path: Path) -> None:
    """As an interrupted download leaves them."""
    tmp_path.joinpath("m").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "m" / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="the index of these shards is missing: is the download complete"):
        mg.open(tmp_path / "m")


def test_a_variant_is_opened_if_nothing_else_is_there(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "m")
    (directory / "model.safetensors.index.json").rename(directory / "model.safetensors.index.fp16.json")
    assert mg.open(directory).names() == ["a", "b"]
    assert mg.open(directory / "model.safetensors.index.fp16.json").names() == ["a", "b"]
    save_file({"c": torch.ones(2)}, directory / "model.safetensors")
    assert mg.open(directory).names() == ["c"]


def test_other_broken_directories(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "twice")
    save_file({"a": torch.ones(2)}, directory / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which has no such tensor"):
        mg.open(directory)
    index["weight_map"] = {"a": "model-1.safetensors"} | {"a ": "model-2.safetensors"}
    save_file({"a": torch.ones(2), "a ": torch.ones(1)}, directory / "model-2.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="'a' is in both .* and model-2"):
        mg.open(directory)
    for text, message in (
        ("[]", "expected a JSON object"),
        ('{"weight_map": 3}', "not a weight index"),
        ("{}", "not a weight index"),
        ('{"weight_map": ' + "[" * 5000, "not valid JSON: nested deeper"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' is repeated"),
    ):
        (directory / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            mg.open(directory)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors.*it contains nothing"):
        mg.open(tmp_path / "empty")


@pytest.mark.parametrize("wrap", [None, "state_dict", "model"])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(tmp_path: Path, wrap: str | None, zipped: bool) -> None:
    module = Tied()
    content = module.state_dict() if wrap is None else {wrap: module.state_dict(), "epoch": 3}
    torch.save(content, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    opened = mg.open(tmp_path / "m.pt")
    assert torch.equal(opened.read("head.weight"), module.embed.weight)
    assert opened.aliases() == {"head.weight": "embed.weight"}


def test_unsafe_and_broken_torch_files_are_refused(tmp_path: Path) -> None:
    torch.save(Tied(), tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match="refused: the pickle wants to run code"):
        mg.open(tmp_path / "module.pt")
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(CheckpointError, match=r"evil\.bin"):
        mg.open(tmp_path / "evil.bin")
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a readable torch file"):
        mg.open(tmp_path / "empty.bin")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="contains no tensors"):
        mg.open(tmp_path / "none.pt")
    torch.save(torch.ones(2), tmp_path / "bare.pt")
    with pytest.raises(CheckpointError, match="not a dict of tensors"):
        mg.open(tmp_path / "bare.pt")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "meta", "quantised", "nested"])
def test_tensors_without_plain_values_are_refused(tmp_path: Path, kind: str) -> None:
    tensor = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.empty(3, device="meta"),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }[kind]()
    torch.save({"w": torch.ones(2), "odd": tensor}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=f"m.pt: 'odd' is a {kind} tensor"):
        mg.open(tmp_path / "m.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_endless_names_in_pickles_are_refused_at_once(tmp_path: Path, zipped: bool) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    long = b"ctorch._utils\n" + b'{"a":' * 100_000
    if zipped:
        with zipfile.ZipFile(tmp_path / "m.pt") as given, zipfile.ZipFile(tmp_path / "bad.pt", "w") as made:
            for record in given.infolist():
                made.writestr(record.filename, given.read(record.filename).replace(b"ctorch._utils\n", long))
    else:
        (tmp_path / "bad.pt").write_bytes((tmp_path / "m.pt").read_bytes().replace(b"ctorch._utils\n", long))
    with pytest.raises(CheckpointError, match="the pickle asks for 'torch._utils"):
        mg.open(tmp_path / "bad.pt")


def test_refusals_say_what_the_pickle_wanted(tmp_path: Path) -> None:
    torch.save({"w": Tied()}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="WeightsUnpickler error: Unsupported global: .*Tied"):
        mg.open(tmp_path / "m.pt")


def repacked(source: Path, target: Path, method: int) -> Path:
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(target, "w", method) as made:
        for record in given.infolist():
            made.writestr(record.filename, given.read(record.filename))
    return target


def test_archives_that_torch_would_inflate_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "m.pt")
    small = repacked(tmp_path / "m.pt", tmp_path / "small.pt", zipfile.ZIP_DEFLATED)
    assert small.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match="data.pkl' is compressed, which torch.save never does"):
        mg.open(small)
    plain = repacked(tmp_path / "m.pt", tmp_path / "plain.pt", zipfile.ZIP_STORED)
    assert mg.open(plain).read("w").shape == (1 << 20,)


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_larger_than_their_file_are_refused(tmp_path: Path, zipped: bool) -> None:
    content = {"w": torch.ones(2), "wide": torch.zeros(1).expand(1 << 40)}
    torch.save(content, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="'wide' is float32.*larger than the whole file"):
        mg.open(tmp_path / "m.pt")


def test_keys_that_are_no_names(tmp_path: Path) -> None:
    torch.save({1: torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="the key 1 is of type int, not the name of a tensor"):
        mg.open(tmp_path / "m.pt")


def test_complex_tensors_are_read_and_told_apart(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    marks = set()
    for i, value in enumerate((1 + 1j, 1 + 2j)):
        tensor = torch.full((3,), value, dtype=torch.complex128)
        torch.save({"c": tensor.conj()}, tmp_path / f"{i}.pt")
        opened = mg.open(tmp_path / f"{i}.pt")
        assert torch.equal(opened.read("c"), tensor.conj())
        marks.add(opened.fingerprint())
    assert len(marks) == 2
    assert not [w for w in recwarn if "imaginary" in str(w.message)]


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_are_closed(tmp_path: Path, zipped: bool) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mg.open(tmp_path / "m.pt")
        gc.collect()
    assert not [w for w in caught if w.category is ResourceWarning]


def test_modules_and_state_dicts_keep_their_ties(tmp_path: Path) -> None:
    module = Tied()
    for opened in (mg.open(module), mg.open(module.state_dict())):
        assert opened.names() == ["embed.weight"]
        assert opened.aliases() == {"head.weight": "embed.weight"}
        assert opened.state_dict().keys() == module.state_dict().keys()
    save_model(module, str(tmp_path / "m.safetensors"))
    opened = mg.open(tmp_path / "m.safetensors")
    assert set(opened.aliases()) | set(opened.names()) == {"embed.weight", "head.weight"}
    assert torch.equal(opened.read("head.weight"), module.embed.weight)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        mg.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="cannot open a int"):
        mg.open(3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="'x' is of type int, but a checkpoint maps names to tensors"):
        mg.open({"x": 3})
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="unknown file type"):
        mg.open(tmp_path / "notes.txt")


def test_a_hub_id_respects_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="nobody/nothing: no such path, and not available from the hub"):
        mg.open("nobody/nothing")


def test_a_hub_model_comes_with_its_tokenizer_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    files = [
        "model.safetensors",
        "source.spm",
        "modeling_duck.py",
        "qwen.tiktoken",
        "bpe.codes",
        "README.md",
        "a.msgpack",
    ]
    asked: list[str] = []

    def download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.extend(hub.utils.filter_repo_objects(files, allow_patterns=allow_patterns))
        return str(sharded(tmp_path / "m"))

    monkeypatch.setattr(hub, "snapshot_download", download)
    mg.open("nobody/nothing")
    assert asked == files[:-1]


def write_gguf(path: Path, kinds: dict[str, str]) -> dict[str, np.ndarray[Any, Any]]:
    """A file of tensors `name -> kind`, and what should be read from it."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    written: dict[str, np.ndarray[Any, Any]] = {}
    for name, kind in kinds.items():
        values = np.arange(-4, 60).reshape(2, 32)
        if kind.startswith("Q"):
            size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
            writer.add_tensor(name, np.zeros((2, size), np.uint8), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            written[name] = values.astype({"I": "int", "F": "float"}[kind[0]] + kind[1:])
            writer.add_tensor(name, written[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def test_gguf_integers_and_doubles_are_read_as_they_are(tmp_path: Path) -> None:
    kinds = ("I8", "I16", "I32", "I64", "F32", "F64")
    written = write_gguf(tmp_path / "m.gguf", {kind.lower(): kind for kind in kinds})
    opened = mg.open(tmp_path / "m.gguf")
    for name, expected in written.items():
        assert opened.spec(name).dtype == getattr(torch, str(expected.dtype))
        assert opened.read(name).dtype == opened.spec(name).dtype
        assert np.array_equal(opened.read(name).numpy(), expected)
        assert np.array_equal(opened.read(name, (1, 2)).numpy(), expected[1:])
    merged = mg.merge({"a": tmp_path / "m.gguf", "b": tmp_path / "m.gguf"})
    assert np.array_equal(merged["i32"].numpy(), written["i32"])


def test_gguf_that_cannot_be_dequantised(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"plain": "F32", "packed": "Q8_1"})
    with pytest.raises(CheckpointError, match="'packed' is Q8_1, which cannot be dequantised"):
        mg.open(tmp_path / "m.gguf")


def test_gguf_is_dequantised(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    weights = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("plain", weights)
    quantised = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = mg.open(tmp_path / "m.gguf")
    assert opened.spec("packed").shape == (4, 64)
    assert np.array_equal(opened.read("plain", (1, 3)).numpy(), weights[1:3])
    expected = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(opened.read("packed", (1, 3)).numpy(), expected[1:3])
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        mg.open(tmp_path / "bad.gguf")
