"""Numpy's files are believed only where their bytes bear them out."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.errors import InputError
from merganser.evolve import numpy_files
from merganser.evolve.numpy_files import read_arrays


def packed(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_wrote_is_read_as_it_was(tmp_path, save):
    arrays = {
        "a/b": np.arange(6).reshape(2, 3),
        "f": np.asfortranarray(np.ones((3, 2))),
        "t": np.array([True]),
        "s": np.float32(2),
    }
    save(tmp_path / "x.npz", **arrays)
    found = read_arrays(tmp_path / "x.npz")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    np.save(tmp_path / "x.npy", arrays["f"])
    np.testing.assert_array_equal(read_arrays(tmp_path / "x.npy")[""], arrays["f"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a numpy file"),
        (b"\x80\x04K\x01.", "pickles can run code"),
        (packed(np.ones(4)).replace(b"(4,)", b"(9,)"), "describes an array of shape"),
        (packed(np.ones(4)).replace(b"(4,), }      ", b"(999999999,),}"), "describes|not a numpy array"),
        (packed(np.ones(4))[:-1], "describes"),
        (packed(np.ones(4))[:9], "not a numpy array"),
        (packed(np.array(["a"])), "expected an array of numbers"),
        (b"PK\x03\x04 damaged", "a damaged .npz file"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_arrays(tmp_path / "x.npy")


def test_what_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(numpy_files, "LARGEST", 2**20)
    np.savez_compressed(tmp_path / "bomb.npz", answers=np.zeros((2**18,)))
    with pytest.raises(InputError, match="unpacks to"):
        read_arrays(tmp_path / "bomb.npz")
    with zipfile.ZipFile(tmp_path / "two.npz", "w") as archive:
        archive.writestr("a.npy", packed(np.ones(1)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.npy", packed(np.ones(1)))
    with pytest.raises(InputError, match="two arrays of one name"):
        read_arrays(tmp_path / "two.npz")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_flipped_byte_does_worse_than_an_error(tmp_path_factory, data):
    stream = io.BytesIO()
    np.savez(stream, answers=np.ones((3, 4)))
    content = bytearray(stream.getvalue() if data.draw(st.booleans()) else packed(np.ones((3, 4))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.npz"
    path.write_bytes(bytes(content))
    try:
        found = read_arrays(path)
    except InputError:
        return
    assert all(array.dtype.kind in "bfiu" for array in found.values())
