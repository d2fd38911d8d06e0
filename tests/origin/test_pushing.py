"""Uploads, to a hub that is made up."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import merganser as mg
from merganser.errors import InputError, MerganserError


class Hub:
    """Stands in for `huggingface_hub`."""

    constants = SimpleNamespace(ENDPOINT="https://hub.example")

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, repository: str, **options: Any) -> None:
        self.calls.append((repository, options))

    def upload_folder(self, **options: Any) -> None:
        if self.failure:
            raise self.failure
        self.calls.append(("upload", options))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr("merganser.origin.pushing.require", lambda module, extra: made)
    return made


def test_a_dry_run_needs_no_network(models: Path, monkeypatch) -> None:
    monkeypatch.setattr("merganser.origin.pushing.require", lambda *_: pytest.fail("the hub was asked for"))
    out = mg.run("recipe.yml", "out")
    (out / "secrets.txt").write_text("mine")
    upload = mg.origin.push(out, "org/name", dry_run=True)
    assert upload.url is None
    assert {"README.md", "recipe.yml", "merganser.lock.json", "model.safetensors"} <= set(upload.files)
    assert "secrets.txt" not in upload.files
    assert upload.files["model.safetensors"] == (out / "model.safetensors").stat().st_size


def test_only_known_files_go_up(models: Path, hub: Hub) -> None:
    out = mg.run("recipe.yml", "out")
    (out / "secrets.txt").write_text("mine")
    assert mg.origin.push(out, "org/name", private=True).url == "https://hub.example/org/name"
    created, (_, options) = hub.calls
    assert created == ("org/name", {"private": True, "exist_ok": True})
    sent = [
        path.name
        for path in out.iterdir()
        if any(fnmatch.fnmatch(path.name, each) for each in options["allow_patterns"])
    ]
    assert "model.safetensors" in sent
    assert "secrets.txt" not in sent


def test_a_changed_output_stays_here(models: Path, hub: Hub) -> None:
    out = mg.run("recipe.yml", "out")
    (out / "config.json").write_text('{"changed": 1}')
    with pytest.raises(InputError, match="config.json has changed.*nothing was uploaded"):
        mg.origin.push(out, "org/name")
    assert hub.calls == []
    assert mg.origin.push(out, "org/name", check=False).url


def test_tokens_are_not_shown(models: Path, hub: Hub) -> None:
    out = mg.run("recipe.yml", "out")
    hub.failure = RuntimeError("401 for Bearer abc.def with hf_abcDEF123\nmore")
    with pytest.raises(MerganserError) as caught:
        mg.origin.push(out, "org/name")
    assert str(caught.value) == "org/name: the upload failed: 401 for … with …"


@pytest.mark.parametrize("name", ["name", "a/b/c", "org/name@main", "../x", "org/"])
def test_names_of_repositories(models: Path, name: str) -> None:
    with pytest.raises(InputError, match="expected owner/name"):
        mg.origin.push("base", name, dry_run=True)
