"""The header of a GGUF file: what the reference library reads is read, and no count is trusted."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import merganser as mg
from merganser.checkpoints.gguf_header import read_gguf_header
from merganser.errors import CheckpointError

gguf = pytest.importorskip("gguf")
BLOCKS = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
HUGE = 1 << 62


def header(tensors: int, settings: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, settings) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def setting(kind: int, value: bytes) -> bytes:
    return text("k") + struct.pack("<I", kind) + value


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, name: str = "w") -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_custom_alignment(64)
    writer.add_array("tokens", ["a", "bc", "ü"])
    writer.add_array("scores", [0.5, 1.5])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_bool("flag", True)
    writer.add_tensor("deep", np.arange(48, dtype=np.float32).reshape(2, 3, 8))
    writer.add_tensor("half", np.arange(8, dtype=np.float16).reshape(2, 4))
    packed = gguf.quants.quantize(np.random.default_rng(0).normal(size=(2, 3, 64)), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", np.arange(5, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def test_tensors_lie_where_the_library_finds_them(written: Path) -> None:
    entries = read_gguf_header(written.read_bytes(), BLOCKS).tensors
    expected = {t.name: t for t in gguf.GGUFReader(str(written)).tensors}
    assert list(entries) == list(expected)
    opened = mg.open(written)
    for name, entry in entries.items():
        theirs = expected[name]
        assert entry.shape == tuple(int(n) for n in reversed(theirs.shape))
        assert (entry.start, entry.stop - entry.start) == (theirs.data_offset, theirs.n_bytes)
        values = theirs.data if name == "vector" else gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        assert np.array_equal(opened.read(name).numpy(), values)
        assert np.array_equal(opened.read(name, (1, 2)).numpy(), values[1:2])


def test_the_fingerprint_follows_the_weights_not_the_place(written: Path) -> None:
    copy, other = written.with_name("copy.gguf"), written.with_name("other.gguf")
    copy.write_bytes(written.read_bytes())
    other.write_bytes(written.read_bytes()[:-8] + b"\1" * 8)
    one, two, three = (mg.open(path).fingerprint() for path in (written, copy, other))
    assert one == two != three


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot mmap an empty file"),
        (b"GGU", "announces 4 bytes"),
        (b"GGML" + b"\0" * 40, "does not start with GGUF"),
        (header(0, 0, version=1), "unknown version 1"),
        (header(0, 0, version=3 << 24), "big-endian"),
        (header(HUGE, 0), "tensors at byte"),
        (header(0, HUGE), "settings at byte"),
        (header(0, 1, setting(9, struct.pack("<IQ", 9, HUGE))), "values at byte"),
        (header(0, 1, setting(9, struct.pack("<IQ", 0, HUGE))), "values at byte"),
        (header(0, 1, setting(9, struct.pack("<IQ", 9, 1) * 9)), "unknown kind 9"),
        (header(0, 1, setting(8, struct.pack("<Q", HUGE))), "values at byte"),
        (header(0, 1, setting(77, b"1234")), "unknown kind 77"),
        (header(0, 1, text("general.alignment") + struct.pack("<II", 4, 3)), "not a power of two"),
        (header(1, 0, tensor((1,) * 5)), "has 5 axes"),
        (header(1, 0, tensor((HUGE, HUGE))), "ends at byte"),
        (header(1, 0, tensor((0, HUGE))), "ends at byte"),
        (header(1, 0, tensor((8,), offset=HUGE)), "ends at byte"),
        (header(1, 0, tensor((8,), kind=999)), "unknown kind 999"),
        (header(1, 0, tensor((8,), kind=2)), "not blocks of 32"),
        (header(2, 0, tensor((0,)) * 2), "'w' twice"),
        (header(1, 0, struct.pack("<Q", 2) + b"\xff\xfe" + b"\0" * 40), "codec can't decode"),
    ],
)
def test_no_count_is_trusted(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"not a readable GGUF file: .*{message}"):
        mg.open(tmp_path / "bad.gguf")


@given(st.binary(max_size=120).map(lambda rest: header(rest[0] % 4 if rest else 0, len(rest) % 4, rest)))
def test_only_value_errors(content: bytes) -> None:
    try:
        read_gguf_header(content, BLOCKS)
    except ValueError:
        return
