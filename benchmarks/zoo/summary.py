"""Print one line for every finished model of the zoo, and collect their cards in `benchmarks/zoo/trained.jsonl`.

    python -m benchmarks.zoo.summary [--cache DIR] [--out FILE]

Cards of models that the file has and this cache does not are kept: a zoo may be trained on several machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.zoo.cards import Card, add_locations, read_card

TRAINED = Path(__file__).parent / "trained.jsonl"
GUARDS = ("median_cosine", "base_share", "points_gained")


def finished(cache: Path) -> Iterator[tuple[str, Card]]:
    """Yield the directory in the cache and the card of every finished model, in alphabetical order."""
    for path in sorted(cache.rglob("card.json")):
        if card := read_card(path.parent):
            yield path.parent.relative_to(cache).as_posix(), card


def line(directory: str, card: Card) -> str:
    """Return where a model is, its scores, its guards and its time."""
    scores = ", ".join(f"{name} {value:.4f}" for name, value in card.scores.items() if "loss" not in name)
    guards = ", ".join(f"{name} {card.guards[name]:.3f}" for name in GUARDS if name in card.guards)
    cpu = sum(epoch.get("cpu_seconds", 0.0) for epoch in card.history)
    return f"{directory}: {scores}; {guards}; {card.steps} steps, {card.seconds:.0f} s ({cpu:.0f} of the processor)"


def known(path: Path) -> dict[str, str]:
    """Return the lines of a file of cards by directory; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {json.loads(each)["directory"]: each for each in lines}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TRAINED)
    add_locations(parser)
    options = parser.parse_args(arguments)
    found = list(finished(options.cache))
    for directory, card in found:
        print(line(directory, card))
    lines = known(options.out) | {name: json.dumps({"directory": name, **asdict(card)}) for name, card in found}
    options.out.write_text("".join(f"{lines[directory]}\n" for directory in sorted(lines)))


if __name__ == "__main__":
    main()
