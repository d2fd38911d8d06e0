"""What a run file's `calibration` names: answers of other models, or the IRT of tinyBenchmarks' file, converted."""

from __future__ import annotations

from pathlib import Path

from merganser.errors import InputError, did_you_mean
from merganser.evolve.arrayfiles import read_arrays
from merganser.evolve.preparation import Calibration, checked_answers


def read(reference: str) -> Calibration:
    """`.npy` or `.npz` (array `answers`, models × items), or the IRT of
    `tinyBenchmarks.npz#benchmark/scenario`."""
    path, _, part = reference.partition("#")
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file")
    return _published(path, part) if part else _answered(path)


def _published(path: str, part: str) -> Calibration:
    """The IRT of `benchmark/scenario` in tinyBenchmarks' file."""
    from merganser.evolve.irt import tinybenchmarks

    benchmark, _, scenario = part.partition("/")
    tiny = tinybenchmarks.load(path, benchmark)
    if not scenario:
        return Calibration(irt=tiny.irt)
    if scenario not in tiny.scenarios:
        raise InputError(f"{path}: no scenario {scenario!r}{did_you_mean(scenario, tiny.scenarios)}")
    return Calibration(irt=tiny.irt.select(tiny.scenarios[scenario]))


def _answered(path: str) -> Calibration:
    """Answers of other models, models × items."""
    arrays = read_arrays(path)
    answers = arrays.get("", arrays.get("answers"))
    if answers is None:
        raise InputError(f"{path}: has no array 'answers'{did_you_mean('answers', arrays)}")
    try:
        return Calibration(answers=checked_answers(answers))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
