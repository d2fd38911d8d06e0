"""Every section makes sense of a small record of its benchmark's shape."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.answers import Score, pack
from benchmarks.reporting import drawing, markdown
from benchmarks.reporting.formats import against, lead
from benchmarks.reporting.leads import LEADS
from benchmarks.reporting.parts import Figure, Table, Text
from benchmarks.reporting.sections import SECTIONS, adaptive
from benchmarks.reporting.sections.multi_task import quality

TIMED = {"seconds": 2.0, "cpu_seconds": 3.0, "peak_anonymous": 2**20}
ABLATED = ("TSV-M without orthogonalisation", "TSV-M without low rank")
METHODS = ("base encoder", "weight averaging", "task arithmetic", "TSV-M", "fine-tuned experts")


def merged(names: tuple[str, ...], method: str, right: int) -> dict[str, Any]:
    bits = np.arange(100) < right
    rows = {str(seed): {name: pack(bits) for name in names} for seed in (0, 1)}
    sweep = {"0.5": 0.8, "1.5": 0.9} if method == "TSV-M" else {}
    return {"tasks": len(names), "method": method, "alpha": 0.3 if sweep else None, "sweep": sweep, "answers": rows}


NAMES = ("trec", "subj")
MULTI_TASK = {
    "sets": {
        str(n): {"tasks": list(NAMES[:n]), "sentences": dict.fromkeys(NAMES[:n], 100), "validation": 8} for n in (1, 2)
    },
    "rows": [
        merged(NAMES[:n], method, 60 + 3 * place)
        for n in (1, 2)
        for place, method in enumerate((*METHODS[:-1], *ABLATED, METHODS[-1]))
    ],
    "ranks": [{**merged(NAMES[:1], "TSV-M", 70), "share": 0.5}],
    "interference": [{"tasks": 2, "truncated": 3.0, "full": 30.0, "after": 0.0}],
    "layers": [
        {"block": block, "procrustes_full": None, "rank": 2, "shape": [4, 6]}
        | dict.fromkeys(("sti", "sti_after", "normalised_sti", "chance", "procrustes_left", "procrustes_right"), 0.5)
        for block in ("layer.0", "layer.1")
    ],
}
BITS = {"trec": "f6", "mr": "f0"}
ROW = {
    "question": {"trec": 0.5, "mr": 0.9},
    "setting": "K = 1",
    "rule": "vote",
    "label": BITS,
    "pair": BITS,
    "told": BITS,
    "forwards": 1.5,
    "numbers": 1.2,
}
ADAPTIVE = {
    "storage": {"8": {"MASS": 1.5, "one merge": 1.0}},
    "sets": {
        "8": {
            "tasks": ["trec", "mr"],
            "sentences": {"trec": 8, "mr": 8},
            "sizes": {"tuning": 4},
            "experts": {"trec": "ff", "mr": "fe"},
            "rows": {
                "MASS": ROW | {"task": 0.9, "set_size": 1.0},
                "TSV-M": ROW | {"label": {"trec": "80", "mr": "80"}},
            },
        }
    },
}
KEPT = {"ratio": 2.0, "per_expert": 0.5, "accuracy": 0.9}
STORED = {"bytes": 2**20, "ratio_to_base": 1.25, "largest": 0.02}
COMPRESSION = {
    "sentences": {"trec": 100},
    "experts": {"trec": 0.9},
    "trained_bytes": 2**20,
    "base_bytes": 2**22,
    "rows": [
        {"method": "experts as trained", "setting": "", "dtype": "float32", "normalised": 1.0, **KEPT, **STORED},
        {"method": "TSV-C", "setting": "rank 1/8", "dtype": "int8", "normalised": 0.99, **KEPT, **STORED},
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
    "references": {"model 0": {"objective": 1.0, "accuracy": 0.6}, "C²M³": {"objective": 2.0, "accuracy": 0.7}},
    "orders": {"best first": {"objective": 1.0, "accuracy": 0.6}},
    "federated": {
        "images": 500,
        "runs": {
            f"{start}: 5: {way}": [[0.1, score], [0.1, score + 0.02]][: 1 if way == "clients alone" else 2]
            for start, gain in (("same", 0.0), ("different", 0.3))
            for way, score in {"clients alone": 0.4, "FedAvg": 0.2, "aligned in a universe": 0.2 + gain}.items()
        },
    },
    "transport": {"Fashion-MNIST: target itself": {"new_task": 0.1, "old_task": 0.9}},
}


def resnets(models: int, ours: float) -> dict[str, Any]:
    """As many networks as asked for, with this share of 1,000 images right for C²M³ and half of them for MergeMany."""

    def row(*shares: float) -> dict[str, Any]:
        right = [pack(np.arange(1000) < 1000 * share) for share in shares]
        accuracy = float(np.mean(shares))
        scores = {"accuracy": 0.1, "repaired_accuracy": accuracy, "repaired_right": right, "cycle_error": 0.0}
        return scores | ({"spread": 0.0, "repaired_spread": 0.01, "runs": len(shares)} if len(shares) > 1 else {})

    rows = {"plain mean": row(0.2), "MergeMany": row(0.49, 0.51), "C²M³": row(0.3), "C²M³ on activations": row(ours)}
    return {
        "single": [0.9] * models,
        "settings": {"test_images": 1000},
        **{str(n): rows for n in range(2, models + 1)},
    }


PEER = {"accuracy": 0.9, "normalised": 0.95, **TIMED}
MIXTURES = {"base": 54.8, "expert of mr": 40.0, "merged, linear": 30.0, "mixture, hidden, top 1": 35.0}
MIXTURES |= {"mixture, singular, top 2": 36.0, "mixture, random, top 1": 50.0}
MOVED = [
    {"network": "mlp", "release": "another seed", "way": way, "mask": mask, "chosen": chosen, "cases": 2}
    | {"new": new, "new_error": 0.01, "old": 0.5, "old_error": None}
    | ({} if chosen is None else {"scale": 1.0, "scale_error": 0.0})
    for way, mask, chosen, new in (
        ("the new base as it is", False, None, 0.1),
        ("permutations", False, False, 0.2),
        ("permutations", False, True, 0.3),
        ("permutations", True, False, 0.4),
        ("permutations", True, True, 0.4),
        ("trained on the four batches", False, None, 0.35),
        ("fine-tuned anew", False, None, 0.5),
    )
]
PAIRS = list(itertools.combinations("abcdef", 2))
MERGEABILITY = {
    "zoos": {
        "text": {"test": {"a": 100}, "inputs": 64, "experts": dict.fromkeys("abcdef", 0.9)},
        "images": {"test": {"a": 100}, "inputs": 64, "experts": dict.fromkeys("abcdef", 0.9)},
    },
    "pairs": [
        {
            "zoo": zoo,
            "experts": list(pair),
            "signals": {"conflict": (7 * place % 15) / 15, "disagreement": 0.02 * place, "slope": 0.1 * place},
            "methods": {
                method: {"loss": 0.01 * place, "accuracies": [0.8, 0.7], "disagreement": 0.02 * place}
                for method in ("mean", "TSV-M")
            },
        }
        for zoo in ("text", "images")
        for place, pair in enumerate(PAIRS)
    ],
}
ATM = {
    "rows": [
        {"method": "task arithmetic", "accuracies": [0.6, 0.62, 0.58], "alphas": [0.3, 0.3, 0.2]},
        {"method": "ATM, 10 rounds of 1", "accuracies": [0.8, 0.83, 0.77], "alphas": []},
    ],
    "cosines": [1.0, 0.9, 0.8],
    "first_share": 0.4,
    "plane": {"points": {"ATM": [[0.0, 0.0], [1.0, 1.0]], "turned": [[0.0, 0.0], [2.0, 0.0]]}, "explained": [0.5, 0.2]},
}
FORGETTING = {
    "stories": 4,
    "held_out": {"questions": 100, "sources": 100},
    "runs": [
        {"seed": seed, "rate": 0.01, "learns": learns, "knew": knew, "take": 0.5}
        | {"training": [{"at": 0, "kept": high, "learned": 0.2}, {"at": 8, "kept": low, "learned": 0.9}]}
        | {
            "path": [
                {"at": 0.0, "kept": high, "learned": 0.2},
                {"at": 0.5, "kept": high, "learned": 0.7 + 0.1 * seed},
                {"at": 1.0, "kept": low, "learned": 0.9},
            ]
        }
        for seed in (0, 1)
        for learns, knew, high, low in (("questions", "stories", -1.0, -2.0), ("sources", "questions", 0.9, 0.5))
    ],
}
RECORDS: dict[str, Any] = {
    "atm": ATM,
    "mergeability": MERGEABILITY,
    "multi_task": MULTI_TASK,
    "adaptive": ADAPTIVE,
    "compression": COMPRESSION,
    "theory": THEORY,
    "single_task_resnet20-bn": resnets(5, ours=0.7),
    "single_task_extras": EXTRAS,
    "single_task_extras_cnn-fashion": {
        "ensembles": {
            name: {"accuracy": score, "networks": count}
            for name, score, count in (
                ("single models", 0.9, 1.0),
                ("ensemble of the models", 0.92, 3.0),
                ("mean of the universe, REPAIR", 0.8, 1.0),
                ("5 samples of the universe", 0.7, 5.0),
                ("5 samples of the universe, REPAIR", 0.85, 5.0),
            )
        }
    },
    "single_task_extras_resnet20-bn": {**EXTRAS, "barriers": {"ResNet20": {"as trained": CURVE}}},
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
            {"method": "tsv", "block": "b", "tasks": 8, "speedup": 5.0, "processor_ratio": 4.0, "extrapolated": True}
            | {
                "limit_ratio": 6.0,
                "matrices": [{"ours": 1.0, "published": 5.0, "ours_memory": 3.0, "ours_error": 1e-3}],
            }
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
    "zip": {
        "halves": [{"method": "zip", "separate": "heads", "joint": 0.8, "own": 0.9, "weights": 1000}],
        "cifar10_halves": [
            {"method": "ensemble of both", "separate": "everything", "joint": 0.6, "own": 0.8, "weights": 2000}
            | {"error": 0.005, "cosines": [0.3, 0.4]},
            {"method": "zip", "separate": "heads", "joint": 0.5, "own": 0.7, "weights": 1000}
            | {"error": 0.005, "ahead": 0.1, "ahead_error": 0.004},
        ],
        "widths": [{"method": "width 256", "accuracy": 0.8}],
        "depths": [{"method": "4 blocks stretched to 6", "accuracy": 0.8, "plan": [0, None, 1]}],
    },
    "transplant": {
        "model": "small",
        "donor": "other",
        "texts": 4,
        "rows": [
            {"rule": "as it was", "perplexity": 50.0, "bits_per_byte": 1.0, "cpu_seconds": None},
            {"rule": "omp:8", "perplexity": 80.0, "bits_per_byte": 1.5, "cpu_seconds": 9.0},
            {"rule": "tokensurgeon omp:8", "perplexity": 81.0, "bits_per_byte": 1.6, "cpu_seconds": 10.0},
        ],
    },
    "moe": {
        "base": "small",
        "rows": [
            {"model": model, "experts_per_token": None, "gsm8k": 50.0, "mr": 60.0, "mean": mean}
            for model, mean in MIXTURES.items()
        ],
    },
    "alignment_transformers": {
        "vit": {
            "cosines": [0.4, 0.5],
            "rows": [
                {"seeds": seeds, "kind": kind, "source": source, "repair": repaired}
                | {"barrier": barrier, "accuracy": 0.6, "ends": 0.8}
                for seeds in ([0, 1], [0, 2], [1, 2], [0, 1, 2])
                for kind, barrier in (("plain", 2.0), ("permutation", 1.0), ("orthogonal", 0.4))
                for source in ("weights", "activations")[: 1 if kind == "plain" else 2]
                for repaired in (False, True)
            ],
        }
    },
    "transport": {"rows": [*MOVED]},
    "forgetting": FORGETTING,
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


def test_merges_of_resnets_are_compared_image_by_image_and_judged() -> None:
    name = "single_task_resnet20-bn"
    said = text_of(name, resnets(5, ours=0.7))
    assert "Goal: single networks at 88 % or more: met (90.0 %)." in said
    assert "keeps 70 % of their accuracy with 5 networks: met (C²M³ on activations, 77.8 %)" in said
    assert "by more than two standard errors: met (+20.0 ± " in said
    said = text_of(name, resnets(5, ours=0.51))
    assert "with 5 networks: not met (C²M³ on activations, 56.7 %)" in said
    assert "two standard errors: not met (+1.0 ± " in said
    assert "because only 3 networks have been merged" in text_of(name, resnets(3, ours=0.7))


def test_the_match_that_needs_nothing_is_named_unless_another_is_clearly_better() -> None:
    lead = LEADS["single_task_resnet20-bn"]
    results = resnets(3, ours=0.7)
    assert "With C²M³ on activations and REPAIR, the mean of 3 ResNet20 keeps 78 %" in lead(results)
    results["3"] = results["3"] | {"C²M³": {"repaired_accuracy": 0.69}}
    assert "With C²M³ and REPAIR, the mean of 3 ResNet20 keeps 77 %" in lead(results)


def test_the_precision_of_training_is_told_where_it_is_not_float32() -> None:
    training = {"images": [50_000], "epochs": [10]}
    for stored, said in ({}, "10 epochs each"), ({"precision": ["bfloat16"]}, "10 epochs in bfloat16 each"):
        results = resnets(3, ours=0.7) | {"training": training | stored}
        assert said in text_of("single_task_vgg11-bn", results)


def test_a_tokenizer_is_transplanted_better_and_faster_or_not() -> None:
    assert "and faster: met." in text_of("transplant", RECORDS["transplant"])
    slower = {**RECORDS["transplant"]["rows"][1], "cpu_seconds": 11.0}
    rows = [RECORDS["transplant"]["rows"][0], slower, RECORDS["transplant"]["rows"][2]]
    assert "and faster: not met." in text_of("transplant", {**RECORDS["transplant"], "rows": rows})


def test_mixtures_and_moved_fine_tunes_are_judged() -> None:
    assert "no mixture beats the best dense merge" in text_of("moe", RECORDS["moe"])
    said = text_of("transport", RECORDS["transport"])
    assert "permutations moved 50 % of what fine-tuning anew gains" in said
    assert "40.0 %, more than training on the four batches alone (35.0 %)" in said


def test_orthogonal_maps_are_compared_with_permutations_like_with_like() -> None:
    said = text_of("alignment_transformers", RECORDS["alignment_transformers"])
    assert "between two seeds: 0.40 by weights" in said
    assert said.count("Goal: half or less: met in 4 of 4 rows.") == 2
    best = "The best permutations (by weights) leave a barrier of 1.00 ± 0.00 and the best orthogonal maps (by weights)"
    assert f"{best} 0.40 ± 0.00 over the same pairs, a share of 0.40: half or less." in said


def test_adaptive_marks_the_best_and_says_whether_the_goal_is_met() -> None:
    assert "Goal (92 % of the labels with all 8 tasks): not met (66.1 %)." in text_of("adaptive", ADAPTIVE)
    (table, *_) = [part for part in adaptive.parts(ADAPTIVE) if isinstance(part, Table)]
    cells = {row[0]: row[3] for row in table.rows}
    assert cells["MASS"].startswith("**66.1 ± ")
    assert "**" not in cells["TSV-M"]


def test_adaptive_says_what_the_limit_misses_and_what_more_tasks_do() -> None:
    found = ADAPTIVE["sets"]["8"]
    limit = {**found["rows"]["MASS"], "limit": True}
    better = {**found["rows"]["MASS"], "label": found["experts"]}
    more = {**found, "rows": {**found["rows"], adaptive.BASE: better, "limit": limit}}
    record = {"sets": {"distinct": found, "14": more, "8": more}, "storage": ADAPTIVE["storage"]}
    said = text_of("adaptive", record)
    assert "only 50 % of the sentences of trec; of the other tasks, of 90 % or more." in said
    assert f"{adaptive.BASE}, keeps more than MASS" in said
    assert "33.9 ± " in said
    growth, stored = [part for part in adaptive.parts(record) if isinstance(part, Table)][-2:]
    assert growth.columns == ["", "8 tasks", "14 tasks"]
    assert [row[0] for row in growth.rows] == ["MASS", "TSV-M", adaptive.BASE, "limit"]
    assert stored.rows == [["MASS", "1.50×"], ["one merge", "1.00×"]]


def test_a_difference_is_told_in_standard_errors() -> None:
    wording = [against(gap, 1.0) for gap in (0.5, -1.5, 2.5)]
    assert [text.split()[0] for text in wording] == ["within", "more", "more"]
    assert "less than two" in wording[1]


def test_compression_names_what_is_farther_off_than_the_error() -> None:
    assert "It stays within one standard error of the experts." in text_of("compression", COMPRESSION)
    far = {**COMPRESSION["rows"][1], "normalised": 0.5}
    text = text_of("compression", COMPRESSION | {"rows": [COMPRESSION["rows"][0], far]})
    assert "These do not: TSV-C rank 1/8 int8 (50.0 %)." in text


def test_compression_says_which_goals_are_met() -> None:
    tasks = {f"t{index}": 0.9 for index in range(8)}
    eight = COMPRESSION | {"experts": tasks, "sentences": dict.fromkeys(tasks, 100)}
    assert text_of("compression", eight).count("not met") == 1  # nothing has a hundredth of the bytes
    small = {**COMPRESSION["rows"][1], "method": "codes", "largest": 0.01, "normalised": 0.996}
    text = text_of("compression", eight | {"rows": [*COMPRESSION["rows"], small]})
    assert "not met" not in text
    assert "in at most 1/100 of a checkpoint for each expert. The smallest that reaches it is codes" in text


def test_experts_are_called_by_their_epochs() -> None:
    assert "trained for two epochs" in text_of("theory", THEORY)
    assert "trained for 9 epochs" in text_of("theory", THEORY | {"epochs": {"trec": 9}})


def test_the_table_of_methods_marks_the_best_merge_and_not_the_experts() -> None:
    cells = {row[0]: [row[1], row[3]] for row in quality(MULTI_TASK).rows}
    assert all(cell.startswith("**88.5 ± ") for cell in cells["TSV-M"])
    assert not any("**" in cell for cell in cells["base encoder"])
    assert cells["fine-tuned experts"] == ["100.0", "100.0"]
    assert not cells.keys() & set(ABLATED)


def test_only_methods_ahead_of_a_rival_are_bold_beside_it() -> None:
    ahead, behind, near = Score(0.05, 0.01), Score(-0.05, 0.01), Score(0.01, 0.01)
    assert [lead(each) for each in (ahead, behind, near)] == ["**+5.0 ± 1.0**", "-5.0 ± 1.0", "+1.0 ± 1.0"]


def test_the_goal_of_mergeability_needs_held_out_pairs_to_be_ranked() -> None:
    assert "on held-out pairs and methods): met." in text_of("mergeability", MERGEABILITY)
    turned = [
        row | {"methods": {name: own | {"loss": -own["loss"]} for name, own in row["methods"].items()}}
        if row["zoo"] == "images"
        else row
        for row in MERGEABILITY["pairs"]
    ]
    said = text_of("mergeability", MERGEABILITY | {"pairs": turned})
    assert "on held-out pairs and methods): met." in said
    assert "The same goal on another backbone: not met." in said


def test_the_best_ensemble_of_samples_is_named() -> None:
    record = "single_task_extras_cnn-fashion"
    assert text_of(record, RECORDS[record]).startswith("3 small CNNs without normalisation on Fashion-MNIST.")
    said = "5 samples of the universe with REPAIR classify 85.0 % correctly together, one mean of all networks with"
    assert LEADS[record](RECORDS[record]).startswith(said)


def test_clients_are_compared_repeat_by_repeat() -> None:
    said = text_of("single_task_extras", EXTRAS)
    assert "alignment changes this by **+30.0 ± 0.0** points with clients aligned in a universe" in said
    assert "clients that start together stay aligned" in said
    runs = EXTRAS["federated"]["runs"] | {"same: 5: aligned in a universe": [[0.1, 0.2], [0.1, 0.3]]}
    assert "stay aligned" not in text_of("single_task_extras", EXTRAS | {"federated": {"images": 500, "runs": runs}})


def test_what_is_forgotten_and_given_back_is_told() -> None:
    said = text_of("forgetting", FORGETTING)
    assert "raises questions from 20.0 to 90.0 % and changes the perplexity on stories from 2.72 to 7.39." in said
    assert "changes questions from 90.0 to 50.0 %. At α = 0.5," in said
    assert "they are 75.0 % and 90.0 %." in said
    assert "50 % of the way back, 75.0 and 90.0 % (rate 0.01)" in LEADS["forgetting"](FORGETTING)


def test_rounds_are_compared_with_task_arithmetic_seed_by_seed() -> None:
    assert "ATM, 10 rounds of 1 is 20.0 ± 0.6 points ahead of task arithmetic" in text_of("atm", ATM)
