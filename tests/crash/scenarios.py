"""Commands to be killed: what they do, what must hold at any moment, and what they must give in the end."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from safetensors.torch import save_file

import merganser.engine.execute as execution
import merganser.engine.processes as processes
from crash import merges
from crash.faults import Counting, faulty_connections
from merganser.engine.disk import Disk
from merganser.engine.publishing import publish
from merganser.evolve.study import Study
from merganser.evolve.tasks import StudyTask
from merganser.library import Library, storage
from merganser.recipes.running import run
from merganser.tuning import score_journal
from merganser.tuning.sweep import sweep


def digest_tree(directory: Path) -> str:
    """Of all files below a directory, those that only processes at work have left out."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            found.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return found.hexdigest()


class Scenario:
    """Something that is done in a directory, again and again until it is not interrupted."""

    name = ""
    #: Whether `disk` is used, so that every operation of it can be made to fail.
    faulty = True

    def prepare(self, directory: Path) -> None:
        """Make what the work needs."""

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        """Do it, or go on with it."""
        raise NotImplementedError

    def wrong(self, directory: Path, expected: str) -> str:
        """What must not be, after a crash and before anybody goes on; empty if all is well."""
        return ""

    def result(self, directory: Path) -> str:
        return digest_tree(directory)

    def strays(self, directory: Path) -> list[str]:
        return merges.strays(directory)


@dataclass(frozen=True)
class Merge(Scenario):
    """A merge to a new directory, or in place of another one."""

    replace: bool

    @property
    def name(self) -> str:
        return "merge, replacing" if self.replace else "merge"

    def prepare(self, directory: Path) -> None:
        if self.replace:
            merges.make_old(directory / "out")

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        merges.merge(directory / "out", disk, resume=again, overwrite=self.replace)

    def wrong(self, directory: Path, expected: str) -> str:
        return merges.wrong(directory / "out", expected, self.replace)

    def result(self, directory: Path) -> str:
        return merges.digest(directory / "out")


class MergeInProcesses(Scenario):
    """A merge of files by two worker processes."""

    name = "merge in processes"
    faulty = False

    def prepare(self, directory: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in ("base", "a", "b"):
            save_file(
                {f"w{i}": torch.randn(90, 90, generator=generator) for i in range(12)},
                directory / f"{name}.safetensors",
            )
        recipe = {"method": "ties", "base": "base.safetensors", "models": ["a.safetensors", "b.safetensors"]}
        (directory / "recipe.yml").write_text(json.dumps(recipe))

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        execution.SPAN, processes._WORTH = 1, 0
        run(directory / "recipe.yml", directory / "out", resume=again, workers=2, processes=True)

    def wrong(self, directory: Path, expected: str) -> str:
        out = directory / "out"
        return "OUT is not complete" if out.exists() and self.result(directory) != expected else ""

    def result(self, directory: Path) -> str:
        return digest_tree(directory / "out")


class Directory(Scenario):
    """A directory written in one go, as alignments and adapters are, in place of another one."""

    name = "directory, replacing"

    def prepare(self, directory: Path) -> None:
        merges.make_old(directory / "out")

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        disk = disk or Counting()

        def write(made: Path) -> None:
            for number in range(5):
                disk.write_file(made / str(number), bytes(1000 * number))

        publish(directory / "out", write, overwrite=True, disk=disk)

    def wrong(self, directory: Path, expected: str) -> str:
        out = directory / "out"
        return merges.wrong(out, merges.digest(out) if self._is_new(out) else "", replace=True)

    def result(self, directory: Path) -> str:
        return merges.digest(directory / "out")

    def _is_new(self, out: Path) -> bool:
        return out.is_dir() and {path.name for path in out.iterdir()} == set("01234")


class Sweep(Scenario):
    """A sweep over eight values, scored at once."""

    name = "sweep"

    def prepare(self, directory: Path) -> None:
        for name, value in (("base", 0.0), ("a", 1.0)):
            (directory / name).mkdir()
            save_file({"w": torch.full((50, 50), value)}, directory / name / "model.safetensors")

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        recipe: dict[str, Any] = {
            "method": "task_arithmetic", "base": str(directory / "base"), "models": [str(directory / "a")],
        }  # fmt: skip
        values = [number / 8 for number in range(8)]
        journal = directory / "scores.jsonl"
        with patch.object(score_journal, "Disk", lambda: disk or Counting()):
            sweep(recipe, {"scale": values}, lambda v, b: float(v.weights()["w"].mean()), journal=journal)

    def result(self, directory: Path) -> str:
        records = [json.loads(line) for line in (directory / "scores.jsonl").read_text().splitlines()]
        return str([(record["label"], record["score"]) for record in records])


class LibraryBuild(Scenario):
    """A library of two experts."""

    name = "library"

    def prepare(self, directory: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in ("base", "a", "b"):
            (directory / name).mkdir()
            tensors = {f"w{i}": torch.randn(60, 50, generator=generator) for i in range(4)}
            save_file(tensors, directory / name / "model.safetensors")

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        if again and self._is_finished(directory):
            return
        with patch.object(storage, "DISK", disk or Counting()):
            Library.build(
                directory / "base", {"a": directory / "a", "b": directory / "b"}, directory / "lib", copy_base=True
            )

    def _is_finished(self, directory: Path) -> bool:
        file = directory / "lib" / "library.json"
        return file.exists() and not json.loads(file.read_text()).get("pending")

    def result(self, directory: Path) -> str:
        assert set(Library(directory / "lib").experts) == {"a", "b"}
        files = sorted((directory / "lib" / "experts").iterdir())
        return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()

    def strays(self, directory: Path) -> list[str]:
        return sorted(path.name for path in (directory / "lib").rglob("*.partial"))


class LibraryChange(LibraryBuild):
    """One expert of a library is removed, another one is added."""

    name = "library, changed"

    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        super().work(directory)
        (directory / "b").rename(directory / "c")

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        with patch.object(storage, "DISK", disk or Counting()):
            library = Library(directory / "lib")
            if "b" in library or os.path.lexists(directory / "lib/experts/b.safetensors"):
                library = library.remove("b")
            if "c" not in library:
                library.add("c", directory / "c")

    def wrong(self, directory: Path, expected: str) -> str:
        library = Library(directory / "lib")
        for name in library.experts:
            library.expert(name)
        return "" if "a" in library else "an expert is lost"

    def result(self, directory: Path) -> str:
        library = Library(directory / "lib")
        return str([library.experts, [(finding.part, finding.sound) for finding in library.verify()]])


class StudyRun(Scenario):
    """A study of synthetic models."""

    name = "study"
    faulty = False
    settings: ClassVar[dict[str, Any]] = {"stability": 2}

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        from synthetic_designs import design
        from synthetic_world import World

        with Study.open(directory / "s.sqlite") as study:
            if study.store.get("design") is None:
                study.run(design(**self.settings), World())
            else:
                study.resume(World())

    def result(self, directory: Path) -> str:
        study = Study.open(directory / "s.sqlite", readonly=True)
        found = [(trial.label, trial.state, dict(trial.objectives)) for trial in study.trials()]
        scores = study.test_scores(study.best())
        study.close()
        return f"{found} {scores}"

    def strays(self, directory: Path) -> list[str]:
        return []


class ShortStudy(StudyRun):
    """A study of ten trials, whose every statement and commit can fail."""

    name = "study, short"
    faulty = True
    settings: ClassVar[dict[str, Any]] = {
        "tasks": {"quiz": StudyTask(200, subset=20)}, "population": 5, "generations": 2,
    }  # fmt: skip

    def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
        connect = functools.partial(sqlite3.connect, factory=faulty_connections(disk or Counting()))
        with patch.object(sqlite3, "connect", connect):
            super().work(directory, disk, again)


SCENARIOS: tuple[Scenario, ...] = (
    Merge(replace=False),
    Merge(replace=True),
    MergeInProcesses(),
    Directory(),
    Sweep(),
    LibraryBuild(),
    LibraryChange(),
    StudyRun(),
    ShortStudy(),
)
