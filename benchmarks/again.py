"""Measures stored results again, by the commands that are stored with them.

    python -m benchmarks.again [NAME …] [--out DIR] [--mergekit BIN] [--fusionbench BIN] [--py-irt PYTHON]

Runs the commands of `benchmarks/results/NAME.json` (all by default) one after another; what they measure goes to
DIR/NAME.json. A comparison with another program is left out where that program is not given. Everything together takes
a day of two cores with a trained zoo (`make zoo`).
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.records import PEERS, RESULTS, stored


def commands(command: str, json: Path, peers: Mapping[str, Path | None]) -> Iterator[list[str]]:
    """What to run for a stored command, placeholders replaced or left out."""
    for part in command.split(" && "):
        words = iter(shlex.split(part.removeprefix("python ")))
        line = []
        for word in words:
            if word in PEERS:
                next(words)
                line += [word, str(peers[word])] if peers.get(word) else []
            else:
                line.append(word)
        yield [sys.executable, *line, "--json", str(json)]


def main(arguments: Sequence[str] | None = None) -> None:
    known = sorted(path.stem for path in RESULTS.glob("*.json"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("bench") / "results")
    for option, place in PEERS.items():
        parser.add_argument(option, type=Path, metavar=place)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"nothing is stored for {', '.join(unknown)}")
    peers = {option: getattr(options, option[2:].replace("-", "_")) for option in PEERS}
    for name in options.names or known:
        for command in commands(stored(name)["command"], options.out / f"{name}.json", peers):
            print(shlex.join(command), flush=True)
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
