"""Records and numbers of any kind, in terms of JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from types import MappingProxyType

from merganser.plain import plain


@dataclass(frozen=True)
class Record:
    scores: tuple[float, ...]
    names: MappingProxyType[int, str]


def test_records_mappings_and_tuples_become_objects_and_lists() -> None:
    assert plain([Record((0.5, 1), MappingProxyType({3: "three"}))]) == [{"scores": [0.5, 1], "names": {"3": "three"}}]


def test_what_json_does_not_know_is_null_at_any_depth() -> None:
    found = plain({"a": [math.nan, (math.inf, {"b": -math.inf})], "c": 1.0})
    assert json.loads(json.dumps(found, allow_nan=False)) == {"a": [None, [None, {"b": None}]], "c": 1.0}
