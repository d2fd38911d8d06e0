"""The harness' own full evaluation is the reference: any subset must give its rows."""

from __future__ import annotations

import json
import pickle
import random

import pytest
import torch

from merganser.errors import InputError, MerganserError
from merganser.evaluate.harness import Harness
from merganser.evaluate.loaders import Loader

lm_eval = pytest.importorskip("lm_eval")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}}}
training_split: train
test_split: test
output_type: multiple_choice
num_fewshot: {shots}
doc_to_text: "Question: {{{{question}}}} Answer:"
doc_to_choice: "{{{{options}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}
test_split: test
output_type: generate_until
generation_kwargs: {{until: ["w1"], max_gen_toks: 4, do_sample: false}}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list:
  - {{name: whole, filter: [{{function: take_first}}]}}
  - {{name: number, filter: [{{function: regex, regex_pattern: "([0-9])"}}, {{function: take_first}}]}}
"""


@pytest.fixture(scope="module")
def folder(llamas, tmp_path_factory):
    """Task files in `tasks`, data in `data`, a cache of data sets of our own."""
    root = tmp_path_factory.mktemp("harness")
    (root / "data").mkdir()
    (root / "tasks").mkdir()
    draw = random.Random(1)
    for split, count in (("train", 12), ("test", 20)):
        with (root / "data" / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                words = draw.sample([f"w{i}" for i in range(40)], 6)
                record = {"question": " ".join(words[:3]), "options": words[3:], "answer": draw.randrange(3)}
                file.write(json.dumps(record | {"topic": draw.randrange(2)}) + "\n")
    (root / "sums.jsonl").write_text((llamas / "sums.jsonl").read_text())
    for name, shots in (("plain", 0), ("shown", 2)):
        (root / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, shots=shots, folder=root / "data"))
    (root / "tasks" / "sums.yaml").write_text(SUMS.format(folder=root))
    (root / "tasks" / "both.yaml").write_text("group: both\ntask: [plain, shown]\n")
    return root


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


@pytest.fixture(scope="module")
def model(llamas):
    return Loader("causal-lm", str(llamas / "math"))().eval()


@pytest.fixture
def harness(llamas, folder):
    def build(task, **options):
        return Harness(task, str(llamas / "base"), **{"include": str(folder / "tasks"), "batch": 4, **options})

    return build


def reference(folder, llamas, model, task, filtered="none"):
    """The harness' own loop over all items of a task."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    lm = HFLM(pretrained=model, tokenizer=str(llamas / "base"), batch_size=4)
    found = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=0)
    rows = [row for row in found["samples"][task] if row["filter"] == filtered]
    return sorted(rows, key=lambda row: row["doc_id"])


@pytest.mark.parametrize("task", ["plain", "shown"])
def test_a_subset_gives_the_rows_of_the_full_evaluation(harness, folder, llamas, model, task):
    rows = reference(folder, llamas, model, task)
    asked = harness(task)
    with torch.inference_mode():
        full = asked(model, range(20))
        some = asked(model, [13, 2, 7])
    assert full == {"score": [row["acc"] for row in rows], "acc_norm": [row["acc_norm"] for row in rows]}
    assert some["score"] == [full["score"][i] for i in (13, 2, 7)]
    assert 0 < sum(full["score"]) < 20


def test_the_prompt_of_an_item_is_that_of_the_full_evaluation(harness, folder, llamas, model):
    rows = reference(folder, llamas, model, "shown")
    prompts = [question.requests[0].args[0] for question in harness("shown").questions]
    assert prompts == [row["arguments"][0][0] for row in rows]
    assert len({prompt.split("\n\n")[0] for prompt in prompts}) > 1, "examples differ between items"


def test_generation_with_a_filter(harness, folder, llamas, model):
    rows = reference(folder, llamas, model, "sums", "number")
    with torch.inference_mode():
        assert harness("sums", filter="number")(model, [4, 9])["score"] == [rows[i]["exact_match"] for i in (4, 9)]
        with pytest.raises(InputError, match="did you mean 'number'"):
            harness("sums", filter="numbr")(model, [0])


def test_a_group_is_its_tasks_one_after_the_other(harness, model):
    both = harness("both")
    assert len(both) == 40
    assert [both.records[i]["task"] for i in (0, 39)] == ["plain", "shown"]
    with torch.inference_mode():
        found = both(model, [3, 25])["score"]
        assert found == [harness("plain")(model, [3])["score"][0], harness("shown")(model, [5])["score"][0]]


def test_another_model_another_answer(harness, llamas, model):
    asked = harness("plain", metric="acc_norm")
    other = Loader("causal-lm", str(llamas / "base"))().eval()
    with torch.inference_mode():
        first, second, again = (asked(m, range(20)) for m in (model, other, model))
    assert first == again
    assert first != second
    assert set(first) == {"score", "acc"}


def test_data_of_ones_own(harness, folder, tmp_path, model):
    lines = (folder / "data" / "test.jsonl").read_text().splitlines()[:6]
    (tmp_path / "six.jsonl").write_text("\n".join(lines) + "\n")
    asked = harness("plain", data=str(tmp_path / "six.jsonl"))
    assert len(asked) == 6
    assert len(harness("shown", data=str(folder / "data"))) == 20
    with torch.inference_mode():
        assert asked(model, range(6)) == harness("plain")(model, range(6))
    with pytest.raises(InputError, match="give a folder of splits"):
        len(harness("shown", data=str(tmp_path / "six.jsonl"), shots=2))
    with pytest.raises(InputError, match="'both' is a group of tasks"):
        len(harness("both", data=str(tmp_path / "six.jsonl")))
    with pytest.raises(InputError, match="not a file or folder"):
        len(harness("plain", data=str(tmp_path / "absent.jsonl")))


def test_it_travels_without_its_data(harness):
    asked = harness("plain")
    assert len(asked) == 20
    assert len(pickle.dumps(asked)) < 1000
    assert len(pickle.loads(pickle.dumps(asked))) == 20


def test_no_metric_and_no_folder(harness, model):
    with torch.inference_mode(), pytest.raises(InputError, match="did you mean 'acc_norm'"):
        harness("plain", metric="acc_nrm")(model, [0])
    with pytest.raises(InputError, match="not a folder of task files"):
        len(harness("plain", include="absent"))


def test_likelihoods_that_are_not_numbers_fail_rather_than_answer(harness, llamas):
    broken = Loader("causal-lm", str(llamas / "math"))().eval()
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with torch.inference_mode(), pytest.raises(MerganserError, match="not numbers"):
        harness("plain")(broken, [0])
