from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.checkpoints.safetensors_file import CODES, SafetensorsFile, parse_header
from merganser.errors import CheckpointError

SPAN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("name_of_dtype", [d for d in CODES if d not in ("uint64", "uint32", "uint16")])
def test_reads_what_the_reference_writes(tmp_path: Path, name_of_dtype: str) -> None:
    dtype = getattr(torch, name_of_dtype)
    tensors = {"a": torch.arange(12).reshape(4, 3).to(dtype), "scalar": torch.tensor(3).to(dtype)}
    save_file(tensors, tmp_path / "x.safetensors")
    opened = SafetensorsFile(tmp_path / "x.safetensors")
    for name, expected in load_file(tmp_path / "x.safetensors").items():
        assert opened.spec(name).dtype == dtype
        assert opened.read(name).shape == expected.shape
        assert torch.equal(opened.read(name).reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    assert torch.equal(opened.read("a", (1, 3)).to(torch.float64), tensors["a"][1:3].to(torch.float64))


@pytest.mark.parametrize("rows", [None, (0, 1), (3, 4), (2, 900), (5000, 9000)])
def test_hints_of_reading_may_go_beyond_the_end(tmp_path: Path, rows: tuple[int, int] | None) -> None:
    save_file({"a": torch.zeros(4, 3000), "scalar": torch.tensor(1.0)}, tmp_path / "x.safetensors")
    opened = SafetensorsFile(tmp_path / "x.safetensors")
    opened.prefetch("a", rows)
    opened.prefetch("scalar", rows)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": SPAN}, b"1234", "truncated or damaged: 'a' ends"),
        ({"a": SPAN, "b": SPAN}, b"x" * 8, "'a' and 'b' overlap"),
        ({"a": {**SPAN, "data_offsets": [0, 4]}}, b"x" * 8, "needs 8 bytes, its offsets span 4"),
        ({"a": {**SPAN, "shape": [-2]}}, b"x" * 8, "negative or fractional"),
        ({"a": {**SPAN, "shape": [1.5]}}, b"x" * 8, "negative or fractional"),
        ({"a": {**SPAN, "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}, b"", "too large for any tensor"),
        ({"a": {**SPAN, "shape": [1 << 70, 0], "data_offsets": [0, 0]}}, b"", "too large for any tensor"),
        ({"a": {**SPAN, "dtype": "F4"}}, b"x" * 8, "dtype 'F4', which cannot be read"),
        ({"a": {"dtype": "F32"}}, b"x" * 8, "'a' is malformed"),
        ({"a": 3}, b"x" * 8, "'a' is malformed"),
        ([1, 2], b"", "not a JSON object"),
        (b'{"a": ', b"", "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", "the key 'a' is repeated"),
        ({"__metadata__": 3}, b"", "metadata is not"),
        ({"__metadata__": []}, b"", "metadata is not"),
        ({"__metadata__": {"a": 3}}, b"", "metadata is not"),
        ({"a": {**SPAN, "dtype": ["F32"]}}, b"x" * 8, "which cannot be read"),
        ({"a": SPAN}, b"x" * 9, "1 bytes after 'a' do not belong to a tensor"),
        (
            {"a": {**SPAN, "data_offsets": [3, 11]}},
            b"x" * 11,
            "3 bytes between the header and 'a' do not belong to a tensor",
        ),
        ({"a": SPAN, "b": {**SPAN, "data_offsets": [9, 17]}}, b"x" * 17, "1 bytes between 'a' and 'b'"),
        (b"\xef\xbb\xbf{}", b"", "not valid JSON"),
        ("{}".encode("utf-16"), b"", "not valid JSON"),
        (b'{"__metadata__": {"a": "\\ud800"}}', b"", "not valid JSON"),
        (b"[" * 10_000, b"", "nested deeper"),
    ],
)
def test_refuses_what_it_cannot_trust(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(write_raw(tmp_path / "bad.safetensors", header, data))


def test_refuses_absurd_and_missing_headers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        SafetensorsFile(write_raw(tmp_path / "a.safetensors", b"x", length=1 << 60))
    with pytest.raises(CheckpointError, match="truncated: the header needs"):
        SafetensorsFile(write_raw(tmp_path / "b.safetensors", b"{}", length=50))
    (tmp_path / "c.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="too few"):
        SafetensorsFile(tmp_path / "c.safetensors")


@pytest.mark.parametrize("name", ["x.safetensors", "x.gguf", "x.bin"])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, name: str) -> None:
    if name.endswith("gguf"):
        pytest.importorskip("gguf")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 120872\n")
    with pytest.raises(CheckpointError, match="only a Git LFS pointer"):
        mg.open(tmp_path / name)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(8), "b": torch.randn(3, 2)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)


@given(st.binary(max_size=200))
def test_damaged_headers_raise_only_our_errors(raw: bytes) -> None:
    try:
        parse_header(raw, 10_000, "file")
    except CheckpointError as error:
        assert "file" in str(error)


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = {"odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["a"] = {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}
    opened = SafetensorsFile(write_raw(tmp_path / "x.safetensors", header, b"\7" + values.numpy().tobytes()))
    assert torch.equal(opened.read("a"), values)


def test_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(5000)}
    for name in ("x", "y"):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    tensors["a"][-1] = 1
    save_file(tensors, tmp_path / "z.safetensors")
    x, y, z = (SafetensorsFile(tmp_path / f"{name}.safetensors").fingerprint() for name in "xyz")
    assert x == y != z


def test_unknown_name_gets_a_suggestion(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="did you mean 'layer.weight'"):
        SafetensorsFile(tmp_path / "x.safetensors").read("layer.wieght")


def test_metadata_about_the_file_ties_nothing(tmp_path: Path) -> None:
    save_file({"pt": torch.zeros(1), "w": torch.ones(1)}, tmp_path / "x.safetensors", {"format": "pt", "head": "w"})
    assert SafetensorsFile(tmp_path / "x.safetensors").aliases() == {"head": "w"}
