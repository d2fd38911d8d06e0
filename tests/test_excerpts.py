import pytest
from hypothesis import given
from hypothesis import strategies as st

from merganser.excerpts import list_some, shorten


@given(st.text("abc", max_size=40), st.integers(1, 40), st.sampled_from(["ends", "start", "end"]))
def test_a_shortened_text_fits_and_keeps_what_was_asked_for(text, size, keep):
    short = shorten(text, size, keep)
    if len(text) <= size:
        assert short == text
        return
    start, end = short.split("…")
    assert len(short) == size
    assert text.startswith(start)
    assert text.endswith(end)
    assert keep == "ends" or not {"start": end, "end": start}[keep]


@pytest.mark.parametrize(
    ("names", "listed"),
    [((), ""), (("a",), "a"), (("a", "b"), "a, b"), (("a", "b", "c", "d"), "a, b and 2 more")],
)
def test_a_long_list_names_the_first_and_counts_the_others(names, listed):
    assert list_some(names, 2) == listed
