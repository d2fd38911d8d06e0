"""One reader of JSON: what it refuses, and that it raises nothing else."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merganser.strict_json import MAX_BYTES, MAX_DEPTH, parse_json, read_json
from support.source_trees import SOURCE, nodes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_what_json_writes_is_read(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # infinity
        return
    assert parse_json(text, finite=True) == value


@given(st.binary(max_size=60) | st.text(alphabet='{}[]:,"\\ud8tre0-1.5eNaI', max_size=60))
def test_nothing_but_value_errors(text: bytes | str) -> None:
    try:
        parse_json(text, finite=True)
    except ValueError:
        return


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":[', " [ "])
@pytest.mark.parametrize("times", [MAX_DEPTH + 1, 2_000, 200_000])
def test_depth_is_bounded(opening: str, times: int) -> None:
    closing = {"[": "]", '{"a":': "}", '[{"a":[': "]}]", " [ ": "]"}[opening]
    with pytest.raises(ValueError, match="deeper"):
        parse_json(opening * times + "1" + closing * times)


def test_wide_values_are_not_deep() -> None:
    assert parse_json(json.dumps([[1, 2]] * 1000)) == [[1, 2]] * 1000
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "the key 'a' is repeated"),
        ('"\\ud800"', "surrogates not allowed"),
        ("\ufeff{}", "BOM"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ("{}".encode("utf-16"), "codec can't decode"),
        ("1" * 5000, "digits"),
    ],
)
def test_ambiguous_texts_are_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999"])
def test_infinities_only_where_they_are_expected(text: str) -> None:
    parse_json(text)
    with pytest.raises(ValueError, match="is not a number|too large"):
        parse_json(text, finite=True)


def test_a_negative_nought_is_no_count() -> None:
    assert math.copysign(1, parse_json("-0", finite=True)) == -1


def test_pairs_of_surrogates_are_letters() -> None:
    assert parse_json('"\\ud83e\\udd86"') == "🦆"


def test_files_are_read_no_further_than_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "huge.json"
    with file.open("wb") as stream:
        stream.truncate(MAX_BYTES * 64)
    with pytest.raises(ValueError, match="more than"):
        read_json(file)


def test_nothing_else_in_the_product_reads_json() -> None:
    readers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("load", "loads", "JSONDecoder")
        if isinstance(node.value, ast.Name) and node.value.id == "json"
    }
    assert readers == {"strict_json.py"}
