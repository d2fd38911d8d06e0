"""The program behind the figures of input-adaptive merging, from end to end on tiny experts."""

import pytest
import torch

from benchmarks.adaptive import cheapest, distinct_rows, evaluate, limit_row, tune
from benchmarks.adaptive_costs import single_sentences
from benchmarks.adaptive_scores import same_label, shared_heads
from benchmarks.adaptive_setting import Data, Setting
from benchmarks.reporting.sections import adaptive as section
from merganser.library import Library
from merganser.modules.inputs import Inputs

transformers = pytest.importorskip("transformers")

TASKS = ("mr", "subj", "trec", "cr")
CLASSES = (2, 2, 6, 2)
SENTENCES = 3


def sentences(task: int, count: int, seed: int):
    rng = torch.Generator().manual_seed(100 * task + seed)
    ids = torch.randint(6 * task, 6 * task + 6, (count, 5), generator=rng)
    mask = torch.ones_like(ids)
    mask[::2, 3:] = 0
    labels = torch.randint(0, CLASSES[task], (count,), generator=rng)
    return Inputs((), {"input_ids": ids, "attention_mask": mask}), labels


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    encoder = transformers.BertModel(config, add_pooling_layer=False).eval()
    base = {name: tensor.detach().clone() for name, tensor in encoder.named_parameters()}
    experts = {}
    for task in TASKS:
        experts[task] = {
            name: tensor + 0.1 * (torch.randn(tensor.shape[0], 2) @ torch.randn(2, tensor.shape[1]))
            if ".weight" in name and tensor.dim() == 2 and "layer." in name
            else tensor
            for name, tensor in base.items()
        }
    library = Library.build(base, experts, tmp_path_factory.mktemp("rows") / "text", rank_fraction=0.13)
    heads = {
        task: {"weight": torch.randn(classes, 16), "bias": torch.randn(classes)}
        for task, classes in zip(TASKS, CLASSES, strict=True)
    }
    test, tuning = ({task: [sentences(i, SENTENCES, seed)] for i, task in enumerate(TASKS)} for seed in (0, 1))
    support = {task: [sentences(i, SENTENCES, 2)[0]] for i, task in enumerate(TASKS)}
    return Setting(library, heads, encoder, Data(test, tuning, support), dict.fromkeys(TASKS, 0.5))


@pytest.fixture(scope="module")
def report(setting):
    with torch.no_grad():
        model, found = tune(setting)
        found |= evaluate(setting, model, found["tuned"], quick=True)
        found["models"] |= limit_row(setting, model, found["tuned"], setting.data.support)
        found["distinct"] = distinct_rows(setting, found["tuned"])
    return found


def test_every_rule_router_and_baseline_has_a_row(report):
    names = " | ".join(report["models"])
    for expected in ("one polarity head", "batches", "nearest neighbour", "MLP", "from the base", "TSV-Merge", "SMILE"):
        assert expected in names
    for row in report["models"].values():
        assert all(0 <= row[rule] <= 1 for rule in ("told", "label", "pair") if rule in row)
        if "label" in row:
            assert row["pair"] <= row["label"]
            assert row["label_normalised"] == pytest.approx(2 * row["label"])
    assert report["distinct"]["models"]


def test_settings_come_from_validation_sentences(report):
    chosen = report["tuned"]["settings"]
    (row,) = (row for row in report["choices"] if {key: row[key] for key in chosen} == chosen)
    assert all(
        other["accuracy"] <= row["accuracy"] for other in report["choices"] if other["set_size"] < row["set_size"]
    )
    assert {row["score"] for row in report["threshold_and_top"]} == {chosen["score"]}


def test_the_cheapest_choice_within_one_standard_error_is_taken():
    rows = [(0.70, 1.0), (0.79, 2.0), (0.80, 3.0), (0.78, 2.5)]

    def choose(count):
        return cheapest(rows, accuracy=lambda row: row[0], cost=lambda row: row[1], count=count)

    assert choose(10**6) == (0.80, 3.0)
    assert choose(100) == (0.79, 2.0)
    assert choose(4) == (0.70, 1.0)


def test_costs_are_those_of_every_step(report):
    for kinds in report["costs"].values():
        for cost in kinds.values():
            steps = ("first_pass", "router", "second_pass", "switch")
            assert cost["ratio"] == pytest.approx(sum(cost[step] for step in steps))
            assert cost["second_pass"] >= 1


def test_batches_sets_and_answers_are_stored(report):
    assert all(row["batches"] == 1 and row["right"] in (0, 1) for row in report["batches"].values())
    one, two, three = report["sets"]
    assert (one["sets"], two["sets"], three["sets"]) == (4, 6, 4)
    assert one["switch"] == 0 < two["switch"] < three["switch"]
    assert 1 <= one["beside"] <= two["beside"] <= three["beside"]
    assert 0 < two["gram"] + two["eigen"] < 1
    for row in report["models"].values():
        for task, marks in row.get("right", {}).items():
            assert marks.count("1") / len(marks) == pytest.approx(row["per_task"]["label"][task])
    assert all(0 <= row["label"] <= 1 for row in report["redundancy"])


def test_the_results_page_can_show_it(report):
    assert list(section.parts(report | {"samples": SENTENCES}))


def test_single_sentences_are_all_of_them_without_padding(setting):
    found = list(single_sentences(setting))
    assert len(found) == SENTENCES * len(TASKS)
    assert {x.kwargs["input_ids"].shape[1] for x in found} == {3, 5}
    assert all(bool(x.mask.all()) for x in found)


def test_polarity_tasks_share_labels_and_may_share_a_head(setting):
    assert same_label("mr", 1, "cr", 1)
    assert not same_label("mr", 1, "subj", 1)
    heads = shared_heads(setting.heads)
    assert heads["mr"] is heads["cr"]
    assert heads["trec"] is setting.heads["trec"]
    mean = (setting.heads["mr"]["weight"] + setting.heads["cr"]["weight"]) / 2
    torch.testing.assert_close(heads["mr"]["weight"], mean)
