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
    assert labels == [f"score over {name}: on 100 from 1 to 2 in 2 points" for name in "ab"]
