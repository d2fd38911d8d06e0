"""Data of studies, libraries and interference for the screens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from merganser.engine.lock import lock_file
from merganser.errors import InputError
from merganser.studio.files import is_locked
from merganser.studio.roots import Roots

if TYPE_CHECKING:
    from merganser.library.library import Library
    from merganser.routing.adaptive import AdaptiveModel

#: Maximum singular vectors in a picture of overlaps, over all experts.
VECTORS = 64


def show_study(roots: Roots, path: str) -> dict[str, Any]:
    """Return a study as it stands: trials, the front, winners with intervals, and what is left."""
    from merganser.evolve.study import Study
    from merganser.evolve.summary import convergence, describe_comparison, unseen_intervals

    file = roots.find(path)
    study = Study.open(file, readonly=True)
    try:
        design, trials = study.design, study.trials()
        valid = [trial for trial in trials if trial.valid]
        winners = (study.pareto() if len(design.objectives) > 1 else [study.best()]) if valid else []
        forecast = study.forecast()
        return {
            "path": path,
            "algorithm": design.search.algorithm,
            "objectives": [{"name": o.name, "maximize": o.maximize} for o in design.objectives],
            "variables": [variable.name for variable in design.search_space.variables],
            "total": design.search.trials,
            "ended": study.ended,
            "running": is_locked(lock_file(file)),
            "failure": study.failure,
            "seconds_left": forecast.seconds,
            "trials": [_trial(trial) for trial in trials],
            "front": [trial.label for trial in winners],
            "winners": [
                _trial(trial)
                | {
                    "unseen": {
                        name: {"value": i.value, "low": i.low, "high": i.high}
                        for name, i in unseen_intervals(study, trial.label).items()
                    }
                }
                for trial in winners
            ],
            "verdicts": [
                said for o in design.objectives if valid and (said := describe_comparison(study, o, study.best(o.name)))
            ],
            "convergence": convergence(study),
        }
    finally:
        study.close()


def _trial(trial: Any) -> dict[str, Any]:
    return {
        "label": trial.label,
        "place": f"{trial.generation}:{trial.position}",
        "generation": trial.generation,
        "state": trial.state,
        "valid": trial.valid,
        "values": dict(trial.values or {}),
        "objectives": dict(trial.objectives),
        "seconds": trial.seconds,
        "error": trial.reason,
    }


def open_library(roots: Roots, path: str) -> Library:
    """Open a library whose base is inside the directories too."""
    from merganser.library.library import Library

    library = Library(roots.find(path))
    for file in library.base.files():
        roots.find(str(file))
    return library


def show_library(roots: Roots, path: str) -> dict[str, Any]:
    """Return the base and the experts of a library."""
    library = open_library(roots, path)
    size, records = library.size(), library.manifest.experts
    return {
        "path": path,
        "base": library.base.label,
        "base_bytes": size.base,
        "ratio": size.ratio,
        "dtype": library.manifest.dtype,
        "policy": library.manifest.policy.to_dict(),
        "experts": [
            {"name": name, "bytes": record.nbytes, "energy": record.energy, "source": record.source}
            for name, record in records.items()
        ],
    }


def show_budgets(roots: Roots, path: str) -> list[dict[str, Any]]:
    """Return what the experts of a library would keep at smaller budgets; this reads all of their factors."""
    from merganser.library.budgets import predict_budgets

    return predict_budgets(open_library(roots, path))


def show_overlap(roots: Roots, base: str, experts: Mapping[str, str], matrix: str) -> dict[str, Any]:
    """Return |UᵀU| of the leading singular vectors of one task matrix, a block for every two experts."""
    from merganser.interference.surveys import similarity

    opened = {name: roots.open(path) for name, path in experts.items()}
    rank = max(1, VECTORS // max(1, len(experts)))
    source = roots.open(base)
    if matrix not in source:
        raise source.missing(matrix)
    left, _ = similarity(source, opened, matrix, min(rank, *source.spec(matrix).shape[:2]))
    return {
        "matrix": matrix,
        "experts": list(experts),
        "overlap": [[round(v, 4) for v in row] for row in left.tolist()],
    }


class Routes:
    """Routers for libraries of text models; the last one is kept in memory."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._known: tuple[str, AdaptiveModel, Any] | None = None

    def route(self, path: str, text: str) -> dict[str, Any]:
        """Return the weight that a sentence gives each expert, and why.

        `explained` is by layer and expert ‖V_tᵀz‖²/‖z‖², the share of the layer's input z that lies in the span of the
        right singular vectors V_t of what the expert changed there; the residual that weighs experts is what is left.

        Raises:
            InputError: If the library's base is not a text model with a tokenizer.
        """
        from merganser.routing.routers import residuals

        _, model, tokenizer = self._open(path)
        encoded = dict(tokenizer(text, return_tensors="pt"))
        encoded.pop("token_type_ids", None)
        seen = model.first_pass(encoded)
        routing = model.decide(model.router.weights(seen.inputs), 1)
        explained = {}
        for layer, bases in getattr(model.router, "subspaces", {}).items():
            z = seen.inputs[layer]
            left = (residuals(z, bases)[0] / z[0].double().norm()).square()
            explained[layer] = dict(zip(routing.tasks, (1 - left).tolist(), strict=True))
        weights = dict(zip(routing.tasks, routing.weights[0].tolist(), strict=True))
        return {
            "weights": weights,
            "chosen": sorted(routing.sets[0], key=lambda name: -weights[name]),
            "fallback": bool(routing.fallback[0]),
            "threshold": model.settings.threshold,
            "top": model.settings.top,
            "explained": explained,
        }

    def _open(self, path: str) -> tuple[str, AdaptiveModel, Any]:
        if self._known is None or self._known[0] != path:
            from merganser.evaluate.language import kind_of_model
            from merganser.evaluate.loaders import Loader
            from merganser.routing.adaptive import AdaptiveModel
            from merganser.studio.player import load_tokenizer

            library = open_library(self._roots, path)
            directory = library.base.directory
            kind = kind_of_model(directory)
            if directory is None or kind is None:
                raise InputError(f"{path}: routing a sentence needs a base that transformers loads, with its tokenizer")
            module = Loader(kind, str(directory))().float().eval()
            self._known = (path, AdaptiveModel(module, library, load_base=True), load_tokenizer(directory))
        return self._known
