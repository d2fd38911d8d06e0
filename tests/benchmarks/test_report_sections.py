"""Every section makes sense of a small record of its benchmark's shape."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reporting import drawing, markdown
from benchmarks.reporting.parts import Figure, Table, Text
from benchmarks.reporting.sections import SECTIONS, adaptive
from benchmarks.reporting.sections.multi_task import brief

TIMED = {"seconds": 2.0, "cpu_seconds": 3.0, "peak_anonymous": 2**20}
ABLATED = ("TSV-M without orthogonalisation", "TSV-M without low rank")
METHODS = ("base encoder", "weight averaging", "task arithmetic", "TSV-M", "fine-tuned experts")


def merged(tasks: int, method: str, normalised: float) -> dict[str, Any]:
    per_task = {"trec": normalised, "subj": normalised}
    score = {"accuracy": 0.9 * normalised, "normalised": normalised, "per_task": per_task}
    return {"tasks": tasks, "method": method, "alpha": None if method == "base encoder" else 0.3, **score}


MULTI_TASK = {
    "sentences": {name: {"test": 100, "validation": 8} for name in ("trec", "subj")},
    "subsets": {"1": ["trec"], "2": ["trec", "subj"]},
    "rows": [
        merged(n, method, 0.9 + 0.01 * place)
        for n in (1, 2)
        for place, method in enumerate((*METHODS[:-1], *ABLATED, METHODS[-1]))
    ],
    "alpha_sweep": [{"method": "TSV-M", "alpha": alpha, "accuracy": 0.9} for alpha in (0.5, 1.5)],
    "interference": [{"tasks": 2, "method": "TSV-M", "sti": 0.0, "accuracy": 0.9, "normalised": 0.95}],
    "layers": [
        {"block": block, "procrustes_full": None, "rank": 2, "shape": [4, 6]}
        | dict.fromkeys(("sti", "sti_after", "normalised_sti", "chance", "procrustes_left", "procrustes_right"), 0.5)
        for block in ("layer.0", "layer.1")
    ],
}
ROUTED = {"label_normalised": 0.9, "pair_normalised": 0.8, "task": 0.7, "task_top3": 0.9}
ROUTED |= {"per_task": {"label": {"trec": 0.81}, "pair": {"trec": 0.72}}, "right": {"trec": "11110110"}}
PLAIN = {"told_normalised": 0.9, "label_normalised": 0.8, "forwards": 1.0, "per_task": {"label": {"trec": 0.72}}}
SHARES = dict.fromkeys(("first_pass", "router", "second_pass", "switch", "ratio"), 1.0)
ADAPTIVE = {
    "fine_tuned": {"trec": 0.9},
    "samples": 8,
    "models": {
        "MASS, heads by logit": ROUTED,
        "MASS, batches, 4 probes, heads by logit": ROUTED | {"label_normalised": 0.987},
        "TSV-Merge": PLAIN,
    },
    "batches": {"trec": {"batches": 2, "right": 1, "sentences": 8}},
    "wemoe_steps": 10,
    "sets": [
        {"experts": 1, "sets": 8, "tokens": 20, "beside": 1.2, "switch": 0.0, "bytes": 0.0, "gram": 0.0, "eigen": 0.0},
        {"experts": 2, "sets": 28, "tokens": 20, "beside": 1.4, "switch": 2.5, "bytes": 1e6, "gram": 0.3, "eigen": 0.5},
    ],
    "distinct": {"fine_tuned": {"trec": 0.9}, "models": {"MASS, heads by logit": ROUTED}},
    "costs": {"as tuned": {"single_all 256": SHARES}},
    "stored": {"int8": {"base_bytes": 9e6, "relative": 2.0, "relative_to_trained": 1.5, "told_normalised": 0.99}},
    "tuned": {"share": 0.5, "layer": "encoder.3", "settings": {"threshold": 0.1, "top": 1, "score": "logit"}},
    "threshold_and_top": [{"threshold": 0.1, "top": 1, "score": "logit", "accuracy": 0.9, "set_size": 1.0}],
    "redundancy": [{"redundancy": 0.1, "accepted": ["trec"], "accuracy": 0.9, "label": 0.8}],
    "layers": [{"layer": "a", "accuracy": 0.5}, {"layer": "b", "accuracy": None}],
}
KEPT = {"ratio": 2.0, "per_expert": 0.5, "accuracy": 0.9}
COMPRESSION = {
    "sentences": {"trec": 100},
    "experts": {"trec": 0.9},
    "trained_bytes": 2**20,
    "rows": [
        {"method": "experts as trained", "setting": "", "dtype": "float32", "normalised": 1.0, **KEPT},
        {"method": "TSV-C", "setting": "rank 1/8", "dtype": "int8", "normalised": 0.99, **KEPT},
    ],
}
GAPS = [{"eta": eta, "gap": eta**2, "residual": eta**3} for eta in (0.01, 0.005)]
ORDER = {"alpha": 0.5, "epochs": 2, "gap_slope": 2.0, "corrected_slope": 3.0, "printed_slope": 2.0, "gaps": GAPS}
BOUND = {"network": "tanh", "alpha": 1.0, "eta": 0.01, "epochs": 3}
BOUND |= {f"{way}{key}": 0.5 for key in ("c", "hessian", "gradient") for way in ("", "printed_", "corrected_")}
MERGED = {"alpha": 0.3, "own": 0.9, "own_normalised": 1.0, "accuracy": 0.9, "per_task": {"trec": 0.9}}
THEORY = {
    "one_epoch": [{"alpha": 0.5, "relative": 1e-14}],
    "orders": [ORDER],
    "small": {"orders": [ORDER], "bounds": [BOUND]},
    "sentences": {"trec": 100},
    "epochs": {"trec": 2},
    "merging": [
        {"experts": "first epoch", "normalised": 0.97, **MERGED},
        {"experts": "last epoch", "normalised": 0.98, **MERGED},
    ],
    "trajectories": [{"task": "trec", "cosine": 0.9, "first_share": 0.7, "straightness": 0.8}],
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
    "compression": COMPRESSION,
    "theory": THEORY,
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


def text_of(record: str, results: dict[str, Any]) -> str:
    section = next(section for section in SECTIONS if section.record == record)
    found = [part.text for part in section.make(results) if isinstance(part, Text)]
    return " ".join(" ".join(found).split())


def test_adaptive_compares_like_with_like() -> None:
    text = text_of("adaptive", ADAPTIVE)
    assert "MASS as tuned on validation sentences keeps 90.0 %" in text
    assert "80.0 % (TSV-Merge)" in text
    assert "1 of 2 go to their own task first; the tasks with a wrong one are trec (1 of 2)" in text
    assert "keeps 98.7 % of the labels" in text
    tables = [part for part in adaptive.parts(ADAPTIVE) if isinstance(part, Table)]
    assert [row[0] for row in tables[0].rows] == ["MASS, heads by logit", "TSV-Merge"]


def test_the_error_of_a_difference_uses_pairs_where_there_are_some() -> None:
    one, other = {"right": {"trec": "1100"}}, {"right": {"trec": "1010"}}
    assert adaptive.difference_error(one, other, {"trec": 1.0}, 4) == (pytest.approx(0.5**0.5 / 2), True)
    plain = {"per_task": {"label": {"trec": 0.5}}}
    assert adaptive.difference_error(plain, plain, {"trec": 0.5}, 4) == (pytest.approx(0.5 * 2**0.5), False)
    assert adaptive.difference_error(plain, {}, {"trec": 0.5}, 4) is None
    wording = [adaptive.against(gap, 1.0) for gap in (0.5, -1.5, 2.5)]
    assert wording == [
        "within one standard error",
        "more than one standard error, less than two",
        "more than two standard errors",
    ]


def test_compression_names_what_is_farther_off_than_the_error() -> None:
    assert "all 1 ways to store them stay within it" in text_of("compression", COMPRESSION)
    far = {**COMPRESSION["rows"][1], "normalised": 0.5}
    text = text_of("compression", COMPRESSION | {"rows": [COMPRESSION["rows"][0], far]})
    assert "farther off is TSV-C rank 1/8 int8 (50.0 %)" in text


def test_experts_are_called_by_their_epochs() -> None:
    assert "trained for two epochs" in text_of("theory", THEORY)
    assert "trained for 9 epochs" in text_of("theory", THEORY | {"epochs": {"trec": 9}})


def test_the_brief_table_marks_the_best_merge_and_not_the_experts() -> None:
    table = brief(MULTI_TASK)
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["TSV-M"] == ["**93.0**", "**93.0**"]
    assert cells["fine-tuned experts"] == ["96.0", "96.0"]
    assert not cells.keys() & set(ABLATED)
