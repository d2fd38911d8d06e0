"""The tasks of a study: how many items, which of them a candidate is asked, how its score is estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from merganser.errors import did_you_mean
from merganser.evolve import estimators
from merganser.evolve.irt.model import MAX_DIMENSIONS
from merganser.evolve.schema import SettingError, StudyRecord

EXTRACTORS = ("random", "stratified", "irt", "representation")
AUTO = "auto"
#: What `auto` means for extractor, estimator and c: for a subset with a calibration, and for any other.
INFORMED = {"extractor": "irt", "estimator": "gmp-irt", "c": "adaptive"}
UNINFORMED = {"extractor": "random", "estimator": "naive", "c": 0.5}


@dataclass(frozen=True)
class StudyTask(StudyRecord):
    """A task of a study.

    Args:
        items: The number of questions. In a run file it is counted, except for a function.
        subset: The number of questions per candidate; by default all.
        extractor: How the subset is chosen: `"random"`, `"stratified"`, `"irt"` or `"representation"`; by default
            `"irt"` for a subset with a calibration, else `"random"`.
        estimator: How the score of all items is estimated: `"naive"`, `"p-irt"`, `"gp-irt"`, `"mp-irt"` or `"gmp-irt"`;
            by default `"gmp-irt"` for a subset with a calibration, else `"naive"`.
        c: For gp-IRT and gmp-IRT: a number, `"adaptive"` (gmp-IRT*) or `"bias-variance"`.
        dimensions: Dimensions of the IRT; by default chosen by validation.
        test: The share of items held out for the final score; in a run file also a file of test questions.
        strata: Labels of the items for the stratified extractor; in a run file also the field that has them.
        direction: Whether `"higher"` or `"lower"` scores are better, if known.
        test_items: The test items, instead of a share.
        kind: In a run file, the kind of question, such as `"multiple-choice"`.
        data: In a run file, the file of questions.
        task: In a run file, the name of a task of the lm-evaluation-harness.
        function: In a run file, `package.module:name` of a function that answers.
        group: In a run file, the field of questions that are test items together.
        calibration: In a run file, the file with answers of other models.
        options: In a run file, settings of the kind, such as the prompt.

    Example:
        >>> task = mg.evolve.StudyTask(items=200, subset=30, estimator="gmp-irt")
    """

    items: int = 0
    subset: int | None = None
    extractor: str = AUTO
    estimator: str = AUTO
    c: float | str = AUTO
    dimensions: int | None = None
    test: float | str = 0.2
    strata: tuple[str | int, ...] | str | None = None
    direction: Literal["higher", "lower"] | None = None
    test_items: tuple[int, ...] | None = None
    kind: str = ""
    data: str | None = None
    task: str | None = None
    function: str | None = None
    group: str | None = None
    calibration: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (INFORMED if self.calibration and self.subset else UNINFORMED).items():
            if getattr(self, name) == AUTO:
                object.__setattr__(self, name, value)
        if self.estimator not in estimators.NAMES:
            raise SettingError(f"unknown estimator {self.estimator!r}{did_you_mean(self.estimator, estimators.NAMES)}")
        if self.extractor not in EXTRACTORS:
            raise SettingError(f"unknown extractor {self.extractor!r}{did_you_mean(self.extractor, EXTRACTORS)}")
        if not isinstance(self.test, str) and not 0 < self.test < 1:
            raise SettingError(f"test is the share of items held out for the final score, from 0 to 1, not {self.test}")
        if isinstance(self.c, str) and self.c not in ("adaptive", "bias-variance"):
            raise SettingError(f"c is a number in [0, 1], 'adaptive' or 'bias-variance', not {self.c!r}")
        if not isinstance(self.c, str) and not 0 <= self.c <= 1:
            raise SettingError(f"c lies in [0, 1], not {self.c}")
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise SettingError(f"between 1 and {MAX_DIMENSIONS} dimensions, not {self.dimensions}")
        if self.direction == "lower" and self.needs_irt:
            raise SettingError("IRT is for answers that are right or wrong; use the naive estimator")
        if (self.strata is None) == (self.extractor == "stratified"):
            raise SettingError("strata need the stratified extractor, and it needs strata")
        if not self.kind and (self.data or self.task or self.function):
            raise SettingError("'kind' is missing")
        if self.items < 0 or (not self.items and not self.kind):
            raise SettingError(f"items: {self.items}; give the number of items, at least 1")
        if self.items:
            self._check_items()

    def _check_items(self) -> None:
        listed = self.test_items or ()
        if len(set(listed)) < len(listed) or any(not 0 <= item < self.items for item in listed):
            raise SettingError(f"test items must be distinct numbers from 0 to below {self.items}")
        if self.pool < 1 or self.items - self.pool < 1:
            raise SettingError(f"{self.items} items cannot be split into fitness and test items")
        if self.subset is not None and not 1 <= self.subset <= self.pool:
            raise SettingError(
                f"a subset of {self.subset} is more than the {self.pool} items left after "
                f"{self.items - self.pool} were held out for the test"
            )
        if isinstance(self.strata, tuple) and len(self.strata) != self.items:
            raise SettingError(f"{len(self.strata)} strata for {self.items} items")

    @property
    def pool(self) -> int:
        """Return the number of items that fitness and IRT may use."""
        if self.test_items is not None:
            return self.items - len(self.test_items)
        share = self.test if isinstance(self.test, float) else 0.0
        return self.items - max(1, round(self.items * share))

    @property
    def asked(self) -> int:
        """Return the number of items that a candidate is asked."""
        return self.subset or self.pool

    @property
    def needs_irt(self) -> bool:
        return self.estimator != "naive" or self.extractor == "irt"
