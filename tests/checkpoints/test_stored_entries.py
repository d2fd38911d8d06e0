"""Entries as bytes: what torch reads, without torch."""

import json
import struct
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.base import View, read_entries
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.checkpoints.stored_entries import StoredEntries

TENSORS = {
    "matrix": torch.randn(6, 4).bfloat16(),
    "cube": torch.randn(5, 2, 3),
    "steps": torch.tensor([7]),
    "scalar": torch.tensor(2.5),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "flat": torch.empty(3, 0),
}


@pytest.fixture
def stored(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return mg.open(tmp_path)


@pytest.mark.parametrize("rows", [None, (0, 2), (1, 3), (2, 99), (4, 2)])
@pytest.mark.parametrize("name", sorted(TENSORS))
def test_rows_are_those_that_torch_reads(stored, name, rows):
    whole = TENSORS[name]
    expected = whole if rows is None or not whole.shape else whole[slice(*rows)]
    read, entries = stored.read(name, rows), stored.read_stored(name, rows)
    assert read.shape == expected.shape
    assert torch.equal(read, expected)
    assert len(entries) == expected.numel()
    assert entries.element == Element.of(expected.dtype)
    assert entries.bytes.tobytes() == expected.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert torch.equal(entries.tensor(), expected.reshape(-1))


def test_reading_makes_no_copy_and_warns_of_nothing(stored):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = stored.read("matrix")
    assert tensor.data_ptr() == stored.read_stored("matrix").address
    assert stored.read("matrix", (2, 4)).data_ptr() == tensor.data_ptr() + 2 * 4 * 2


def test_what_is_not_aligned_is_copied(tmp_path):
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                         "w": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]}}).encode()  # fmt: skip
    header += b" " * (-len(header) % 8)
    values = np.array([1.5, -2, 3], np.float32)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1" + values.tobytes())
    file = SafetensorsFile(path)
    assert file.read_stored("w").address % 4 == 0
    np.testing.assert_array_equal(file.read("w", (1, 3)), values[1:])


def test_views_compute_what_they_read(stored):
    view = View(stored, "view")
    assert view.read_stored("matrix") is None
    assert torch.equal(read_entries(view, "matrix", (1, 2)).tensor(), TENSORS["matrix"][1])


def test_tensors_that_are_not_in_a_row_have_no_entries():
    transposed = mg.open({"w": torch.randn(3, 4).T})
    assert read_entries(transposed, "w") is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_are_those_of_torch(dtype):
    values = torch.cat([torch.randn(100) * 10.0 ** torch.randint(-8, 5, (100,)), torch.tensor([0.0, -0.0])]).to(dtype)
    np.testing.assert_array_equal(StoredEntries.of(values).numbers().astype(np.float64), values.double().numpy())


def test_memory_in_common_is_found():
    room = StoredEntries.empty(10, Element.of("float32"))
    assert room[2:5].overlap(room[4:8])
    assert room[4:8].overlap(room)
    assert not room[2:4].overlap(room[4:8])
