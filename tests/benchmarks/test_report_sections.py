"""Every section makes sense of a small record of its benchmark's shape."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reporting import drawing, markdown
from benchmarks.reporting.parts import Figure, Table
from benchmarks.reporting.sections import SECTIONS
from benchmarks.reporting.sections.multi_task import brief

TIMED = {"seconds": 2.0, "cpu_seconds": 3.0, "peak_anonymous": 2**20}
METHODS = ("base encoder", "weight averaging", "task arithmetic", "TSV-M", "TSV-M without either", "fine-tuned experts")


def merged(tasks: int, method: str, normalised: float) -> dict[str, Any]:
    per_task = {"trec": normalised, "subj": normalised}
    score = {"accuracy": 0.9 * normalised, "normalised": normalised, "per_task": per_task}
    return {"tasks": tasks, "method": method, "alpha": None if method == "base encoder" else 0.3, **score}


MULTI_TASK = {
    "sentences": {"trec": {"test": 100}, "subj": {"test": 100}},
    "subsets": {"1": ["trec"], "2": ["trec", "subj"]},
    "rows": [merged(n, method, 0.9 + 0.01 * place) for n in (1, 2) for place, method in enumerate(METHODS)],
    "alpha_sweep": [{"method": "TSV-M", "alpha": alpha, "accuracy": 0.9} for alpha in (0.5, 1.5)],
    "interference": [{"tasks": 2, "method": "TSV-M", "sti": 0.0, "accuracy": 0.9, "normalised": 0.95}],
    "layers": [
        {"block": block, "procrustes_full": None}
        | dict.fromkeys(("sti", "sti_after", "normalised_sti", "chance", "procrustes_left", "procrustes_right"), 0.5)
        for block in ("layer.0", "layer.1")
    ],
}
ROUTED = {"label_normalised": 0.9, "pair_normalised": 0.8, "task": 0.7, "task_top3": 0.9}
SHARES = dict.fromkeys(("first_pass", "router", "second_pass", "switch", "ratio"), 1.0)
ADAPTIVE = {
    "fine_tuned": {"trec": 0.9},
    "samples": 8,
    "models": {"MASS": ROUTED, "TSV-Merge": {"told_normalised": 0.9, "label_normalised": 0.8, "forwards": 1.0}},
    "distinct": {"fine_tuned": {"trec": 0.9}, "models": {"MASS": ROUTED}},
    "costs": {"as tuned": {"single_first 32": SHARES}},
    "stored": {"int8": {"relative": 2.0, "relative_to_trained": 1.5, "told_normalised": 0.99}},
    "tuned": {"share": 0.5, "layer": "encoder.3", "settings": {"threshold": 0.1, "top": 1}},
    "threshold_and_top": [{"threshold": 0.1, "top": 1, "score": "logit", "accuracy": 0.9, "set_size": 1.0}],
    "redundancy": [{"redundancy": 0.1, "accepted": ["trec"], "accuracy": 0.9}],
    "layers": [{"layer": "a", "accuracy": 0.5}, {"layer": "b", "accuracy": None}],
}
CURVE = {"barrier": 0.1, "midpoint_accuracy": 0.9, "lowest_accuracy": 0.8}
CURVE |= {"positions": [0, 1], "losses": [0.1, 0.2], "accuracies": [0.9, 0.8]}
RUNS = {"runs": 2, "objective": 1.0, "objective_std": 0.0, "accuracy": 0.9, "accuracy_std": 0.0}
EXTRAS = {
    "barriers": {"MLP": {"as trained": CURVE, "C²M³": CURVE}},
    "seeds": {"Git Re-Basin": RUNS | {"lowest_accuracy": 0.8, "highest_accuracy": 0.9}},
    "cycles": {"C²M³": {"distance": 0.0, "largest_distance": 0.0, "units_back": 1.0}},
    "similarity": {"before": {"weight_cosine": 0.1}, "after": {"weight_cosine": 0.5}},
    "subsets": {
        "2 of 5": dict.fromkeys(
            (*("subsets", "joint_accuracy", "separate_accuracy", "joint_lowest"), "separate_lowest", "objective_ratio"),
            0.9,
        )
    },
    "ensembles": {"single models": {"accuracy": 0.9, "networks": 1.0}},
    "federated": {"clients alone": {"round_1": 0.5}, "FedAvg": {"round_1": 0.6, "round_2": 0.7, "spread": 0.1}},
    "transport": {"Fashion-MNIST: target itself": {"new_task": 0.1, "old_task": 0.9}},
}
PEER = {"accuracy": 0.9, "normalised": 0.95, **TIMED}
RECORDS: dict[str, Any] = {
    "multi_task": MULTI_TASK,
    "adaptive": ADAPTIVE,
    "single_task_extras": EXTRAS,
    "peers": {
        "programs": {"Merganser": {"version": "1", **TIMED}, "mergekit": {"version": "2", **TIMED}},
        "rows": [
            {"method": "linear", "program": "Merganser", "difference": None, **PEER},
            {"method": "ties", "program": "Merganser", "difference": None, "spread": 0.01, **PEER},
            {"method": "linear", "program": "mergekit", "difference": 1e-7, **PEER},
        ],
    },
    "lowrank": {
        "threads": 1,
        "merging": [
            {"block": "b", "tasks": 8, "speedup": 5.0, "processor_ratio": 4.0, "matrices": [{"ours_error": 1e-7}, {}]}
        ],
        "memory": {"layers": [2, 8], "ratio": 1.1},
        "library": {"experts": 20, "base_bytes": 9, "int8": {"ratio": 1.9, "energy": 0.9}},
        "rebuilding": {"rebuild_over_copy": 2.0},
    },
    "alignment": {
        "compare": [
            {"network": "MLP", "models": 3, "ours_seconds": 1.0, "reference_seconds": 9.0, "ratio": 9.0}
            | {"ratio_of_iterations": 3.0, "ours_objective": 2.0, "reference_objective": 2.0}
            | {"ours_iterations": 3, "reference_iterations": 9}
        ],
        "scale": {"seconds": {"2": 0.1, "5": 0.3}, "growth": 1.1},
        "memory": {"width": 4, "peak_gigabytes": 0.5},
    },
    "irt": {
        "entropy": 0.5,
        "fits": [
            {"dimensions": 3, "chosen": False, "seconds": 1.0, "log_loss": 0.5},
            {"dimensions": 2, "chosen": True, "seconds": 1.0, "log_loss": 0.5, "peer_seconds": 90.0}
            | {"peer_log_loss": 0.6, "times_faster": 90.0},
        ],
    },
    "taskvectors": {"params": "200M", "start_up": 1.0, "sides": {"recipe": {"ratio_to_limit": 1.1, **TIMED}}},
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_section_of_a_small_record(record: str) -> None:
    section = next(section for section in SECTIONS if section.record == record)
    parts = list(section.make(RECORDS[record]))
    assert any(isinstance(part, Table) for part in parts)
    for part in parts:
        assert markdown.write(part)
        if isinstance(part, Table):
            assert all(len(row) == len(part.columns) for row in part.rows), part.caption
        if isinstance(part, Figure):
            assert drawing.shows(drawing.render(part), part)


def test_a_record_and_a_figure_belong_to_one_section_only() -> None:
    names = [section.record for section in SECTIONS]
    assert len(set(names)) == len(names)
    assert set(RECORDS) <= set(names)


def test_the_brief_table_marks_the_best_merge_and_not_the_experts() -> None:
    table = brief(MULTI_TASK)
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["TSV-M"] == ["**93.0**", "**93.0**"]
    assert cells["fine-tuned experts"] == ["95.0", "95.0"]
    assert "TSV-M without either" not in cells
