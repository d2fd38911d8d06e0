"""Read the `calibration` of a run file: answers of other models, or the IRT of a converted tinyBenchmarks file.

Answers are an array, or samples logged by the lm-evaluation-harness, one file per model.
"""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path

import numpy as np

from merganser.errors import InputError, did_you_mean
from merganser.evaluate.questions import read_index
from merganser.evaluate.records import read_records
from merganser.evolve.numpy_files import read_arrays
from merganser.evolve.preparation import Calibration, check_answers


def read(reference: str) -> Calibration:
    """Read a calibration.

    Args:
        reference: A `.npy` or `.npz` file (array `answers`, models × items); `tinyBenchmarks.npz#benchmark/scenario`;
            or the harness' samples, `results/*/samples_quiz_*.jsonl#acc`: a pattern that matches one file per model,
            and the metric, by default the first.

    Returns:
        The answers, or the IRT.

    Raises:
        InputError: If there is no such file, or it has another content.

    Example:
        >>> read("results/*/samples_arc_easy_*.jsonl#acc_norm").answers.shape  # doctest: +SKIP
    """
    path, _, part = reference.partition("#")
    files = find_files(reference)
    if not files:
        raise InputError(f"{path}: no such file")
    if path.endswith(".jsonl"):
        return _ask_sampled(files, part)
    return _load_published(path, part) if part else _read_answers(path)


def find_files(reference: str) -> list[str]:
    """Return the files that a reference names, in order."""
    path = reference.partition("#")[0]
    return [path] if Path(path).is_file() else sorted(glob(path))


def _ask_sampled(files: Sequence[str], metric: str) -> Calibration:
    """Return the answers of the models with these samples: a metric by `doc_id`, NaN where a model has none."""
    rows: list[dict[int, float]] = []
    for file in files:
        row: dict[int, float] = {}
        for placed in read_records(file, ()):
            if "doc_id" not in placed.record:
                raise InputError(
                    f"{placed.place}: not a sample that the lm-evaluation-harness wrote; it has no 'doc_id'"
                )
            names = placed.record.get("metrics") or ()
            chosen = metric or next(iter(names), "")
            value = placed.record.get(chosen)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"{placed.place}: no number for the metric {chosen!r}{did_you_mean(chosen, names)}")
            row.setdefault(read_index(placed, "doc_id"), float(value))  # a document has one line per filter
        rows.append(row)
    answers = np.full((len(rows), 1 + max(max(row) for row in rows)), np.nan)
    for number, row in enumerate(rows):
        answers[number, list(row)] = list(row.values())
    try:
        return Calibration(answers=check_answers(answers))
    except InputError as error:
        raise InputError(f"{files[0]}: {error}") from None


def _load_published(path: str, part: str) -> Calibration:
    """Return the IRT of `benchmark/scenario` in tinyBenchmarks' file."""
    from merganser.evolve.irt import tinybenchmarks

    benchmark, _, scenario = part.partition("/")
    tiny = tinybenchmarks.load(path, benchmark)
    if not scenario:
        return Calibration(irt=tiny.irt)
    if scenario not in tiny.scenarios:
        raise InputError(f"{path}: no scenario {scenario!r}{did_you_mean(scenario, tiny.scenarios)}")
    return Calibration(irt=tiny.irt.select(tiny.scenarios[scenario]))


def _read_answers(path: str) -> Calibration:
    """Return answers of other models, shape (models, items)."""
    arrays = read_arrays(path)
    answers = arrays.get("", arrays.get("answers"))
    if answers is None:
        raise InputError(f"{path}: has no array 'answers'{did_you_mean('answers', arrays)}")
    try:
        return Calibration(answers=check_answers(answers))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
