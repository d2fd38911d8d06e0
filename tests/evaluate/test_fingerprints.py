"""Whatever decides an answer has a hash: changing any one input changes one of them, and copies have the same."""

from __future__ import annotations

import dataclasses
import shutil
import sys

import pytest

from merganser.evaluate.examiners import KINDS, Function
from merganser.evaluate.fingerprints import _INERT, hash_asking, hash_examiner, hash_source, hash_tokenizer
from merganser.evaluate.model_files import hash_settings

RECORD = {"question": "1 + 1 =", "text": "two", "label": 0, "options": ["1", "2"], "answer": 1}
JUDGE = {"judge": "http://127.0.0.1:1/v1#judge"}
OTHER = {int: 7, float: 2.5, bool: True, str: "other", type(None): 9, dict: {"question": "text"}, tuple: ("END",)}


def examiner(kind, **changes):
    given = JUDGE if kind == "judged" else {}
    return KINDS[kind]([RECORD, {**RECORD, "text": "three"}], "", **{**given, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_an_examiner_counts_or_is_hashed_as_it_is_read(kind):
    plain = examiner(kind)
    for field in dataclasses.fields(plain):
        if field.name in _INERT:
            continue
        value = getattr(plain, field.name)
        other = not value if isinstance(value, bool) else OTHER[type(value)]
        changed = dataclasses.replace(
            plain, **{field.name: other, **({"fields": {}} if field.name != "fields" else {})}
        )
        if field.name in ("shots", "language"):
            changed.__dict__["solved"] = ()  # would read examples
        assert hash_asking(changed) != hash_asking(plain), field.name
    assert hash_asking(examiner(kind, batch=3)) == hash_asking(plain)
    names = set(KINDS)
    assert len({hash_asking(examiner(each))["kind"] for each in names}) == len(names)


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_counts(kind):
    plain = examiner(kind)
    for field in plain.needed:
        other = {**RECORD, field: ["1", "3"] if field == "options" else 0 if field == "answer" else 1}
        changed = dataclasses.replace(plain, source=[other, RECORD])
        found = hash_examiner(changed)
        assert found.pop("data") != hash_examiner(plain)["data"], field
        assert found == {name: value for name, value in hash_examiner(plain).items() if name != "data"}
    assert hash_examiner(dataclasses.replace(plain, source=plain.source[:1])) != hash_examiner(plain)


def test_examples_count_as_they_are_read(tmp_path):
    solved = [{**RECORD, "question": f"{n} + 1 ="} for n in range(2, 6)]
    plain = examiner("multiple-choice", shots=2, examples=solved)
    copy = examiner("multiple-choice", shots=2, examples=[dict(each) for each in solved])
    assert hash_examiner(copy) == hash_examiner(plain)
    changed = examiner("multiple-choice", shots=2, examples=[{**each, "answer": 0} for each in solved])
    assert hash_examiner(changed)["examples"] != hash_examiner(plain)["examples"]


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "spiece.model",
        "merges.txt",
        "vocab.json",
        "added_tokens.json",
        "special_tokens_map.json",
        "config.json",
        "generation_config.json",
        "tokenization_own.py",
    ],
)
def test_every_file_of_a_tokenizer_and_a_configuration_counts(tmp_path, name):
    for folder in ("model", "copy"):
        (tmp_path / folder / "additional_chat_templates").mkdir(parents=True)
        (tmp_path / folder / name).write_text("{}")
        (tmp_path / folder / "README.md").write_text(folder)
    model = str(tmp_path / "model")
    before = hash_settings(model)
    assert hash_tokenizer(model) == hash_tokenizer(str(tmp_path / "copy"))
    assert [each.removeprefix(f"{model}/") for each in before] == [name]
    (tmp_path / "model" / name).write_text("{ }")
    assert hash_settings(model) != before
    assert hash_tokenizer(model) != hash_tokenizer(str(tmp_path / "copy"))
    (tmp_path / "model" / name).unlink()
    assert hash_settings(model) == {}


def test_a_function_is_its_code_and_the_code_beside_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "own_quiz"
    (package / "parts").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "asking.py": "import json\nfrom .parts import rules\n\n\ndef ask(model, items):\n    return rules.score()\n",
        "parts/__init__.py": "",
        "parts/rules.py": "import torch\n\n\ndef score(items):\n    return [1.0] * len(items)\n",
        "parts/unused.py": "",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    found = hash_examiner(Function("own_quiz.asking:ask", 3))
    assert set(found) == {str(package / name) for name in files if name != "parts/unused.py"}
    (package / "parts" / "rules.py").write_text(files["parts/rules.py"].replace("1.0", "0.5"))
    again = hash_source("own_quiz.asking:ask")
    assert {name for name in found if found[name] != again[name]} == {str(package / "parts" / "rules.py")}
    for name in [each for each in sys.modules if each.split(".")[0] == "own_quiz"]:
        del sys.modules[name]


def test_an_installed_function_is_its_file_alone():
    assert [each.rpartition("/")[2] for each in hash_source("numpy.linalg:norm")] == ["__init__.py"]


def test_a_changed_chat_template_is_read_again(llamas, tmp_path):
    from merganser.evaluate.questions import tokenizer_at

    shutil.copytree(llamas / "base", tmp_path / "base")
    assert not tokenizer_at(str(tmp_path / "base")).chat_template
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tokenizer_at(str(tmp_path / "base")).chat_template
