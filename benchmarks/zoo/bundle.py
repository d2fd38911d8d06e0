"""Pack the small networks of the zoo with their cards into one archive, to be offered as a download.

    python -m benchmarks.zoo.bundle zoo.tar [--megabytes 10]

Networks above the limit, data and checkpoints stay out. Unpack the archive in a model directory (`--cache`) to use
the networks there without training them.
"""

from __future__ import annotations

import argparse
import tarfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.summary import finished


def files_of(directory: Path) -> list[Path]:
    """Return the files of a finished network, those in folders inside it as well."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix not in (".pt", ".part"))


def bundle(cache: Path, archive: Path, limit: int) -> list[str]:
    """Pack finished networks of at most `limit` bytes and return their directories."""
    packed = []
    draft = archive.with_name(f"{archive.name}.part")
    with tarfile.open(draft, "w") as out:
        for directory, _ in finished(cache):
            files = files_of(cache / directory)
            if sum(path.stat().st_size for path in files) <= limit:
                for path in files:
                    out.add(path, path.relative_to(cache).as_posix())
                packed.append(directory)
    draft.replace(archive)
    return packed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--megabytes", type=float, default=10, help="leave out networks above this size")
    add_locations(parser)
    options = parser.parse_args(arguments)
    for directory in bundle(options.cache, options.archive, int(options.megabytes * 1e6)):
        print(directory)


if __name__ == "__main__":
    main()
