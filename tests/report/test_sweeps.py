"""Pages of journals of sweeps: values of any shape, of journals that hold them and of those that hold labels only."""

import json
import re

import pytest

from merganser.report.directories import report


def journal(path, labels, **more):
    shared = {"budget": 100, "scored_by": "sc:s", "key": "k"}
    records = [{"label": label, "score": float(i), **shared, **more} for i, label in enumerate(labels)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("weight=[0.2, 0.8] method=ties", ["[0.2, 0.8]", "ties"]),
        ("weight={'*.mlp.*': 0.5, '*': 1}", ["*.mlp.*"]),
        ("weight=[1, 2", ["[1, 2"]),
    ],
)
def test_labels_of_older_journals(tmp_path, label, shown):
    page, [found] = report(journal(tmp_path / "a.sweep.jsonl", ["weight=0.5 method=linear", label]))
    assert found == {**found, "variants": 2, "best": label}
    text = page.render().replace("&#x27;", "'")
    assert all(part in text for part in shown)


def test_values_of_the_journal_itself(tmp_path):
    file = journal(tmp_path / "a.sweep.jsonl", ["x", "y"], values={"weight": [0.25, 0.75]})
    page, _ = report(str(file))
    assert page.write(str(tmp_path / "page.html")).is_file()
    assert ">weight</th>" in page.render()
    assert "[0.25, 0.75]" in page.render()


def test_variants_without_a_score_are_left_out_of_the_charts(tmp_path):
    file = journal(tmp_path / "a.sweep.jsonl", ["a=1 b=1", "a=1 b=2", "a=2 b=1"])
    file.write_text(file.read_text().replace('"score": 0.0', '"score": null'))
    page, _ = report(file)
    labels = re.findall(r'aria-label="([^"]*)"', page.render())
    assert labels == [
        "2 trials over a, b; scores from 1 to 2",
        *(f"score over {name}: on 100 from 1 to 2 in 2 points" for name in "ab"),
    ]


def answered(path, answers):
    """A journal of variants with the answers of each to the same questions."""
    records = [
        {
            "label": f"method={method} weight={weight}",
            "values": {"method": method, "weight": weight},
            "budget": len(given),
            "score": sum(given) / len(given),
            "answers": [given],
            "key": f"{method} {weight}",
            "scored_by": "quiz",
        }
        for (method, weight), given in answers.items()
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("right", "said"), [(5, "better than the runner-up"), (38, "cannot tell the best from the runner-up")]
)
def test_the_best_is_better_only_if_the_answers_say_so(tmp_path, right, said):
    ones = [1.0] * 40
    second = [1.0] * right + [0.0] * (40 - right)
    file = answered(tmp_path / "a.sweep.jsonl", {("ties", 0.5): ones, ("linear", 0.2): second})
    page, _ = report(file)
    html = page.render()
    assert said in html
    assert "ties · 0.5: 1 (0." in html, "an interval in the tooltip"
    assert "2 trials over method, weight" in html


def test_a_sweep_records_the_answers_that_its_report_compares(tmp_path):
    """What the journal holds is what the score is the mean of."""
    from merganser.tuning.score_journal import ScoreJournal
    from merganser.tuning.sweep import mean_score

    answers = [[1.0, 0.0, 1.0, 1.0], [0.5, 0.25]]
    with ScoreJournal(tmp_path / "b.sweep.jsonl", "quiz") as journal_file:
        journal_file.add("k", {"weight": 0.5}, "weight=0.5", 4, mean_score(answers), answers)
    record = json.loads((tmp_path / "b.sweep.jsonl").read_text())
    assert record["answers"] == answers
    assert record["score"] == pytest.approx((0.75 + 0.375) / 2)
    page, _ = report(tmp_path / "b.sweep.jsonl")
    assert "with 95 % intervals" in page.render()
