"""The bytes of every method without a decomposition are those that were recorded."""

import json
from pathlib import Path

from benchmarks import recorded_bytes

RECORDED = Path(__file__).with_name("recorded_bytes.json")


def test_merges_give_the_recorded_bytes():
    # A change that is meant to alter bytes records them again: python -m benchmarks.recorded_bytes --portable --record
    recorded = json.loads(RECORDED.read_text())
    assert recorded_bytes.differences(recorded, recorded_bytes.measure(decompositions=False)) == []


def test_a_changed_missing_or_new_merge_is_a_difference():
    before = {"linear": "1", "ties": "2"}
    assert recorded_bytes.differences(before, {"linear": "1", "ties": "3"}) == ["ties"]
    assert recorded_bytes.differences(before, {"linear": "1"}) == ["ties"]
    assert recorded_bytes.differences(before, {**before, "new": "4"}) == ["new"]
