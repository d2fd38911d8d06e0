"""Lines, collected cards and the archive of finished networks."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from benchmarks.zoo import bundle, summary
from benchmarks.zoo.cards import Card, read_card


def finish(cache: Path, name: str, size: int, **guards: float) -> None:
    directory = cache / name
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(bytes(size))
    card = Card(
        model="mlp",
        command="python -m benchmarks.zoo.vision",
        seed=0,
        data={},
        epochs=1,
        steps=7,
        training={},
        scores={"test_accuracy": 0.9, "test_loss": 0.3},
        history=[{"loss": 1.0, "seconds": 4.0, "cpu_seconds": 2.0}],
        seconds=4.0,
        guards=guards,
    )
    card.write(directory)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    finish(tmp_path / "zoo", "vision/mnist/mlp/seed0", 10, median_cosine=0.31)
    finish(tmp_path / "zoo", "text/mr/seed0", 100_000, base_share=0.75)
    unfinished = tmp_path / "zoo" / "vision" / "mnist" / "mlp" / "seed1"
    unfinished.mkdir()
    (unfinished / "checkpoint.pt").write_bytes(b"x")
    return tmp_path / "zoo"


def test_every_finished_network_has_a_line_and_its_card(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary.main(["--cache", str(cache), "--out", str(tmp_path / "trained.jsonl")])
    text, vision = capsys.readouterr().out.splitlines()
    assert text.startswith("text/mr/seed0: test_accuracy 0.9000; base_share 0.750; 7 steps")
    assert "median_cosine 0.310" in vision
    first, second = map(json.loads, (tmp_path / "trained.jsonl").read_text().splitlines())
    assert [first.pop("directory"), second["directory"]] == ["text/mr/seed0", "vision/mnist/mlp/seed0"]
    assert Card(**first) == read_card(cache / "text/mr/seed0")


def test_cards_of_other_machines_are_kept(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "trained.jsonl"
    elsewhere = {"directory": "text/cr/seed0", "model": "elsewhere"}
    stale = {"directory": "text/mr/seed0", "model": "stale"}
    out.write_text(f"{json.dumps(elsewhere)}\n{json.dumps(stale)}\n")
    summary.main(["--cache", str(cache), "--out", str(out)])
    first, second, third = map(json.loads, out.read_text().splitlines())
    assert first == elsewhere
    assert (second["directory"], second["model"]) == ("text/mr/seed0", "mlp")
    assert third["directory"] == "vision/mnist/mlp/seed0"


def test_small_networks_are_packed_with_their_cards(cache: Path, tmp_path: Path) -> None:
    assert bundle.bundle(cache, tmp_path / "zoo.tar", limit=50_000) == ["vision/mnist/mlp/seed0"]
    with tarfile.open(tmp_path / "zoo.tar") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in early 3.10 and 3.11
        archive.extractall(tmp_path / "other")
    unpacked = tmp_path / "other" / "vision/mnist/mlp/seed0"
    assert read_card(unpacked) == read_card(cache / "vision/mnist/mlp/seed0")
    assert (unpacked / "model.safetensors").stat().st_size == 10
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
