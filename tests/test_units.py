import pytest

from merganser.errors import InputError, RecipeError
from merganser.recipes.fields import read_size
from merganser.units import parse_size, show_size, show_time

SIZES = {"1000000": 10**6, "2GiB": 2 << 30, "512MB": 512 * 10**6, "1.5g": 1_500_000_000, " 3 kib ": 3072, "1T": 10**12}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_read_alike_in_options_and_recipes(text):
    assert parse_size(text) == read_size(text, "output.shard_size") == SIZES[text]


@pytest.mark.parametrize("text", ["", "big", "5iB", "-1GB", "1e9", "2 GiBs", "GB", "5Gı", "٣GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="not a size"):
        parse_size(text)
    with pytest.raises(RecipeError, match="output.shard_size: expected a size"):
        read_size(text, "output.shard_size")


def test_sizes_may_be_absurd():
    assert parse_size("9" * 400) > 10**399


@pytest.mark.parametrize("value", [None, True, [1], 0, "0GB", -5])
def test_a_shard_has_a_size(value):
    with pytest.raises(RecipeError, match="expected a size such as 5GB"):
        read_size(value, "output.shard_size")


def test_sizes_and_durations_as_shown():
    assert [show_size(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5120.0 GiB"
    ]  # fmt: skip
    assert [show_time(s) for s in (0.4, 61, 3661)] == ["0:00", "1:01", "1:01:01"]
