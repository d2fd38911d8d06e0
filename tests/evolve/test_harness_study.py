"""A study whose fitness is a task of the lm-evaluation-harness, from its run file to the winner."""

from __future__ import annotations

import pytest

from merganser.errors import MerganserError
from merganser.evolve import Study, loading

pytest.importorskip("pymoo")
pytest.importorskip("lm_eval")

TASK = """
task: quiz_here
dataset_path: json
dataset_kwargs: {data_files: {test: absent.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}} Answer:"
doc_to_choice: "{{options}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
ENTRY = "kind: lm-eval, task: quiz_here, options: {include: FOLDER, metric: acc_norm}"


@pytest.fixture
def tasks(tmp_path, tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "quiz.yaml").write_text(TASK)
    return tmp_path / "tasks"


def test_a_study_on_a_task_of_the_harness(run_file, tasks, tmp_path):
    path = run_file(
        ("kind: multiple-choice", ENTRY.replace("FOLDER", str(tasks))),
        ("c: adaptive", "c: 0.5, extractor: stratified, strata: topic"),
    )
    run = loading.load(path)
    assert run.design.tasks["quiz"].items == 60
    study = Study.open(tmp_path / "study.sqlite")
    winner = study.run(run.design, run.evaluate)
    assert [trial.error for trial in study.trials() if trial.state != "done"] == []
    answers = study.store.answers(winner)
    assert set(answers) == {"quiz", "quiz.acc"}
    assert len(answers["quiz"].items) == 8
    assert set(answers["quiz"].values) <= {0.0, 1.0}
    assert len(study.test_scores(winner)) == 2
    study.close()


def test_a_task_whose_data_is_missing(run_file, tasks):
    path = run_file(("kind: multiple-choice, data: ./quiz.jsonl", ENTRY.replace("FOLDER", str(tasks))))
    with pytest.raises(MerganserError, match="'quiz_here' of the harness cannot be loaded"):
        loading.load(path)
