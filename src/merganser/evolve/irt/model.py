"""A fitted item response model: abilities of models and parameters of questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, ndtri

from merganser.errors import CheckpointError, InputError
from merganser.evolve.arrays import Array
from merganser.evolve.irt.logistic import Posterior, regress
from merganser.strict_json import parse_json

FORMAT = "merganser-irt-1"


@dataclass(frozen=True)
class Items:
    """Parameters of the questions.

    Attributes:
        discrimination: a, shape (items, dimensions).
        difficulty: β, shape (items,).
        errors: Standard errors of each a and, in the last column, of β, if known.

    Example:
        >>> import numpy as np
        >>> items = mg.evolve.irt.Items(np.ones((5, 1)), np.zeros(5))
    """

    discrimination: Array
    difficulty: Array
    errors: Array | None = None

    def __len__(self) -> int:
        return len(self.difficulty)

    def __getitem__(self, chosen: ArrayLike) -> Items:
        index = np.asarray(chosen)
        errors = None if self.errors is None else self.errors[index]
        return Items(self.discrimination[index], self.difficulty[index], errors)

    @property
    def embedding(self) -> Array:
        """Return [a ‖ β], the coordinates of IRT clustering."""
        return np.column_stack([self.discrimination, self.difficulty])


#: Information along a direction, relative to the prior's, below which the likelihood does not determine it.
INFORMED = 0.1
#: Maximum number of dimensions of ability.
MAX_DIMENSIONS = 15


@dataclass(frozen=True)
class Normal:
    """A normal prior with diagonal precision.

    Attributes:
        mean: The mean, shape (dimensions,).
        precision: The precision, shape (dimensions,).

    Example:
        >>> import numpy as np
        >>> prior = mg.evolve.irt.Normal(np.zeros(1), np.ones(1))
    """

    mean: Array
    precision: Array


@dataclass(frozen=True)
class IRT:
    """A multidimensional two-parameter logistic model: p(model m answers item i) = σ(a_i · γ_m − β_i).

    Attributes:
        abilities: γ, shape (models, dimensions).
        items: Discriminations and difficulties.
        prior: The fitted prior of an ability.
        covariances: The Laplace covariance of each ability, shape (models, dimensions, dimensions).
        validation: The held-out log-loss by number of dimensions that was tried.

    Example:
        >>> import numpy as np
        >>> irt = mg.evolve.irt.fit(np.random.default_rng(0).integers(0, 2, (12, 30)), dimensions=1)
        >>> irt.abilities.shape
        (12, 1)
    """

    abilities: Array
    items: Items
    prior: Normal
    covariances: Array | None = None
    validation: Mapping[int, float] = field(default_factory=dict)

    @property
    def dimensions(self) -> int:
        return int(self.items.discrimination.shape[1])

    def probabilities(self, abilities: ArrayLike | None = None) -> Array:
        """Return p of every ability (rows; by default the fitted models) on every item (columns)."""
        gamma = self.abilities if abilities is None else np.asarray(abilities, dtype=np.float64)
        p: Array = expit(gamma @ self.items.discrimination.T - self.items.difficulty)
        return p

    def ability(self, answers: ArrayLike, items: ArrayLike | None = None, *, prior: bool = True) -> Posterior:
        """Estimate the ability of a model from its answers to some items (by default all), with fixed item parameters.

        With `prior` this is the mode of the posterior. Without it, it is the maximum of the likelihood, as in
        tinyBenchmarks, in the directions that these items determine, and the prior's mean in the others.
        """
        seen = self.items if items is None else self.items[items]
        targets = np.asarray(answers, dtype=np.float64)
        if targets.shape != (len(seen),):
            raise InputError(f"{len(seen)} items need {len(seen)} answers, not an array of shape {targets.shape}")
        if prior:
            return regress(seen.discrimination, -seen.difficulty, targets, self.prior.mean, self.prior.precision)
        return self._maximise_likelihood(seen, targets)

    def _maximise_likelihood(self, seen: Items, targets: Array) -> Posterior:
        """Return γ = μ + Λ^(-½) V z, with V the right singular vectors of a Λ^(-½) along which the items are
        informative.

        A direction counts if σ²/4 ≥ `INFORMED` (an item's information is at most a²/4, relative to the prior's); the
        first always counts.
        """
        whitened = seen.discrimination / np.sqrt(self.prior.precision)
        _, sigma, directions = np.linalg.svd(whitened, full_matrices=True)
        strength = np.zeros(self.dimensions)
        strength[: len(sigma)] = sigma**2 / 4
        informed = (strength >= INFORMED) | (np.arange(self.dimensions) == 0)
        if informed.all():
            return regress(seen.discrimination, -seen.difficulty, targets)
        basis = directions[informed].T / np.sqrt(self.prior.precision)[:, None]
        silent = directions[~informed].T / np.sqrt(self.prior.precision)[:, None]
        offset = seen.discrimination @ self.prior.mean - seen.difficulty
        found = regress(seen.discrimination @ basis, offset, targets)
        return Posterior(self.prior.mean + basis @ found.mean, basis @ found.covariance @ basis.T + silent @ silent.T)

    def intervals(self, level: float = 0.95) -> tuple[Array, Array]:
        """Return Laplace intervals of the fitted abilities, with fixed item parameters."""
        if self.covariances is None:
            raise InputError("these abilities have no uncertainty; fit them to answers to get intervals")
        errors = np.sqrt(np.diagonal(self.covariances, axis1=1, axis2=2))
        reach = ndtri(0.5 + level / 2) * errors
        return self.abilities - reach, self.abilities + reach

    def select(self, items: Sequence[int] | ArrayLike) -> IRT:
        """Return the same models on some of the items."""
        return IRT(self.abilities, self.items[items], self.prior, self.covariances, self.validation)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file: arrays, and the validation losses in its metadata."""
        from safetensors.numpy import save_file

        metadata = {"format": FORMAT, "validation": json.dumps({str(d): v for d, v in self.validation.items()})}
        save_file(self.to_arrays(), Path(path), metadata)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> IRT:
        """Read a file that `save` wrote."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise CheckpointError(f"{path} is not a file; expected a file written by IRT.save")
        try:
            with safe_open(Path(path), "numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, TypeError, ValueError) as error:  # numpy lacks some dtypes of the format
            raise CheckpointError(f"{path} is not an IRT file: {error}") from error
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not an IRT file: its format is {metadata.get('format')!r}, not {FORMAT!r}"
            )
        try:
            found = cls.from_arrays(arrays)
            losses = parse_json(metadata.get("validation", "{}"))
            return replace(found, validation={int(d): float(loss) for d, loss in losses.items()})
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{path}: a damaged IRT file: {error}") from error

    def to_arrays(self) -> dict[str, Array]:
        """Return the arrays of the model by name, for `from_arrays`."""
        arrays = {
            "abilities": self.abilities,
            "discrimination": self.items.discrimination,
            "difficulty": self.items.difficulty,
            "errors": self.items.errors,
            "prior.mean": self.prior.mean,
            "prior.precision": self.prior.precision,
            "covariances": self.covariances,
        }
        return {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> IRT:
        """Return the model from the arrays of `to_arrays`; other arrays are ignored.

        Raises:
            ValueError: If an array is missing, does not fit the others, or is not finite.
        """
        for name in ("abilities", "discrimination", "difficulty", "prior.mean", "prior.precision"):
            if name not in arrays:
                raise ValueError(f"it has no array {name!r}")
        models, items = len(np.atleast_1d(arrays["abilities"])), len(np.atleast_1d(arrays["difficulty"]))
        width = int(np.atleast_1d(arrays["prior.mean"]).shape[0])
        shapes: dict[str, tuple[int, ...]] = {
            "abilities": (models, width),
            "discrimination": (items, width),
            "difficulty": (items,),
            "errors": (items, width + 1),
            "prior.mean": (width,),
            "prior.precision": (width,),
            "covariances": (models, width, width),
        }
        for name, shape in shapes.items():
            if name not in arrays:
                continue
            array = arrays[name]
            if array.shape != shape:
                raise ValueError(f"{name!r} has the shape {array.shape}, not {shape} to match the other arrays")
            if array.dtype != np.float64 or not np.isfinite(array).all():
                raise ValueError(f"{name!r} is not made of finite numbers in float64")
        if (arrays["prior.precision"] <= 0).any():
            raise ValueError("'prior.precision' is not positive")
        return cls(
            arrays["abilities"],
            Items(arrays["discrimination"], arrays["difficulty"], arrays.get("errors")),
            Normal(arrays["prior.mean"], arrays["prior.precision"]),
            arrays.get("covariances"),
        )
