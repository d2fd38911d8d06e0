"""Where the zoo lives, and the card that says how each of its models came to be."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from merganser.errors import InputError


@dataclass(frozen=True)
class Card:
    """How a model was made and how good it is. A model with a card is finished; one without resumes.

    `guards` are the figures without which a table of such models means little: how far they left their start.
    """

    model: str
    command: str
    seed: int
    data: dict[str, Any]
    epochs: int
    steps: int
    training: dict[str, Any]
    scores: dict[str, float]
    history: list[dict[str, float]]
    seconds: float
    guards: dict[str, Any] = field(default_factory=dict)
    machine: str = field(default_factory=describe)
    threads: int = field(default_factory=torch.get_num_threads)
    torch: str = torch.__version__

    def write(self, directory: Path) -> None:
        """Write `card.json` last and at once: its presence is the mark of a finished model."""
        draft = directory / "card.json.part"
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        draft.replace(directory / "card.json")


def read_card(directory: Path, schedule: Any = None) -> Card | None:
    """The card of a finished model, or None.

    Args:
        directory: Where the model is, or would be.
        schedule: The dataclass of settings that it must have been trained with; by default any.

    Raises:
        InputError: The model was trained by another version of the zoo, or with other settings.
    """
    path = directory / "card.json"
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    if missing := {each.name for each in fields(Card)} ^ set(stored):
        raise InputError(
            f"{path}: written by another version (fields {', '.join(sorted(missing))}); "
            "remove its directory to train the model again"
        )
    card = Card(**stored)
    if schedule is not None and card.training != asdict(schedule):
        raise InputError(
            f"{path}: trained with {card.training} instead of {asdict(schedule)}; "
            "remove its directory to train the model again"
        )
    return card


def add_locations(parser: argparse.ArgumentParser) -> None:
    """The two options every zoo program takes: where the data is, where the models go."""
    parser.add_argument("--data", type=Path, default=default_data(), help="data directory (env MERGANSER_DATA)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="model directory (env MERGANSER_ZOO)")


def default_data() -> Path:
    return Path(os.environ.get("MERGANSER_DATA") or Path.home() / ".cache" / "merganser" / "data")


def default_cache() -> Path:
    return Path(os.environ.get("MERGANSER_ZOO") or Path.home() / ".cache" / "merganser" / "zoo")


def data_file(data: Path, name: str) -> Path:
    """A file of the data directory, or an error that says where it was sought and how to say otherwise."""
    path = data / name
    if not path.exists():
        raise InputError(f"no {name!r} in the data directory {data}; give --data PATH or set MERGANSER_DATA")
    return path
