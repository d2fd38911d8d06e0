from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.row_runs import RowRun
from merganser.checkpoints.vocabulary import Remapped, VocabularyMap

NAMES = {"embed": ("embed", "embed")}


def models(dtype=torch.float32):
    first = torch.arange(12, dtype=dtype).reshape(6, 2)
    return [
        StateDict({"embed": first, "other": torch.ones(3)}, "a"),
        StateDict({"embed": -first, "other": torch.zeros(3)}, "b"),
    ]


def test_rows_are_moved_averaged_zeroed_and_filled():
    a, b = models()
    runs = (RowRun(2, ((0, 3),)), RowRun(1, ((0, 0), (1, 1))), RowRun(2, ()), RowRun(3, None))
    view = Remapped(a, VocabularyMap(NAMES, runs), [a, b])
    expected = torch.tensor([[6, 7], [8, 9], [-1, -1], [0, 0], [0, 0], [5, 6], [5, 6], [5, 6]], dtype=torch.float32)
    assert torch.equal(view.read("embed"), expected)
    assert view.spec("embed") == TensorSpec((8, 2), torch.float32)
    assert torch.equal(view.read("other"), torch.ones(3))
    assert view.names() == a.names()


@given(st.integers(0, 8), st.integers(0, 8))
def test_any_rows_are_the_rows_of_the_whole(first, last):
    a, b = models(torch.bfloat16)
    runs = (RowRun(2, ((1, 1),)), RowRun(1, ((0, 0), (1, 1))), RowRun(2, ()), RowRun(3, None))
    view = Remapped(a, VocabularyMap(NAMES, runs), [a, b])
    assert torch.equal(view.read("embed", (first, last)), view.read("embed")[first:last])
    assert view.read("embed", (first, last)).dtype is torch.float32
    assert view.spec("embed").dtype is torch.bfloat16


def test_tied_names_are_remapped_with_what_they_are_tied_to():
    table = torch.arange(4.0).reshape(2, 2)
    tied = StateDict({"embed": table, "head": table})
    view = Remapped(tied, VocabularyMap({"embed": ("embed",)}, (RowRun(2, ((0, 0),)), RowRun(1, ()))), [tied])
    assert view.aliases() == {"head": "embed"}
    assert view.spec("head").shape == (3, 2)
    assert torch.equal(view.read("head"), view.read("embed"))


def test_the_fingerprint_depends_on_the_remap_and_on_every_model():
    a, b = models()
    remap = VocabularyMap(NAMES, (RowRun(1, ((0, 0),)),))
    other = VocabularyMap(NAMES, (RowRun(1, ((0, 1),)),))
    prints = {
        Remapped(a, remap, [a, b]).fingerprint(),
        Remapped(a, other, [a, b]).fingerprint(),
        Remapped(a, remap, [a, a]).fingerprint(),
    }
    assert len(prints) == 3


def test_rows_of_a_wider_source_are_not_rounded_on_the_way():
    narrow = StateDict({"embed": torch.ones(2, 1, dtype=torch.bfloat16)}, "narrow")
    wide = StateDict({"embed": torch.full((2, 1), 1.001)}, "wide")
    runs = (RowRun(1, ((0, 0),)), RowRun(1, ((1, 0),)), RowRun(1, ((0, 0), (1, 0))))
    view = Remapped(narrow, VocabularyMap(NAMES, runs), [narrow, wide])
    torch.testing.assert_close(view.read("embed").flatten(), torch.tensor([1.0, 1.001, 1.0005]))
