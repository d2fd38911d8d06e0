"""Cross-moments of the activations of several models, streamed over batches.

For every path the responses z = (z_1, …, z_n) of the units of n models to a sample, at all layers whose output channels
the path orders, give one matrix G = Σ_x z zᵀ. Its blocks C_pq = Σ_x z_p z_qᵀ are the cross-moments of pairs of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from merganser.align.segments import AxisSegments, Factor, product
from merganser.align.symmetries import Symmetry
from merganser.align.terms import TermLayout
from merganser.errors import InputError
from merganser.kernels.assignment import Path
from merganser.modules.batches import InputsLike, forward, require_several
from merganser.modules.moments import Moments, channel_rows, check_finite, evaluating, hook_outputs, output_axis


@dataclass(frozen=True)
class CrossMoments:
    """The matrix G (n·m, n·m) of every path that some layer shows, in float64."""

    symmetry: Symmetry
    count: int
    grams: Mapping[Path, Tensor]

    def pair(self, path: Path, p: int, q: int) -> Tensor:
        """Return C_pq = Σ_x z_p z_qᵀ of one path, shape (m, m)."""
        size = len(self.grams[path]) // self.count
        return self.grams[path][p * size : (p + 1) * size, q * size : (q + 1) * size]

    def factors(self) -> tuple[TermLayout, list[list[Tensor]]]:
        """Return arrays F_p of every model with F_p F_qᵀ = C_pq for p ≠ q, laid out as the terms of an objective.

        They are the rows of a Cholesky factor of G + εI. The addition to the diagonal of G affects no cross-moment, so
        the objective Σ_{p<q} ⟨P_p C_pq, P_q⟩ of the arrays is exact even if G is singular.
        """
        width = {path: len(gram) for path, gram in self.grams.items()}
        axes = {
            "/".join(path): (product(*(Factor(a, self.symmetry.atoms[a].size) for a in path)), product(Factor(None, n)))
            for path, n in width.items()
        }
        layout = TermLayout.of(Symmetry(self.symmetry.atoms, axes))
        rows = {"/".join(path): _cholesky(gram).chunk(self.count) for path, gram in self.grams.items()}
        return layout, [layout.weights({name: own[p] for name, own in rows.items()}) for p in range(self.count)]


def cross_moments(
    models: Sequence[nn.Module], symmetry: Symmetry, batches: Iterable[InputsLike], *, standardize: bool = False
) -> CrossMoments:
    """Run the models on batches and sum the moments of their units.

    Args:
        models: Modules of one architecture; they run in evaluation mode and are not changed.
        symmetry: Their symmetry.
        batches: Inputs; targets are ignored.
        standardize: Use correlations, with a second pass over the batches.

    Raises:
        InputError: If a model is not a module, or there is no batch.
    """
    return CrossMoments(symmetry, len(models), unit_grams(models, [symmetry] * len(models), batches, standardize))


def unit_grams(
    models: Sequence[nn.Module],
    symmetries: Sequence[Symmetry],
    batches: Iterable[InputsLike],
    standardize: bool = False,
) -> dict[Path, Tensor]:
    """Return G = Σ_x z zᵀ of every path, where z has the units of the first model, then those of the second, …

    Each model has its own symmetry, with the same atoms, possibly of different sizes.
    """
    if not all(isinstance(model, nn.Module) for model in models):
        raise InputError("matching by activations runs the models: give modules, not weights")
    require_several(batches, "batches")
    if any(atom.group != "permutation" for symmetry in symmetries for atom in symmetry.atoms.values()):
        models = [_copy_canonical(model, symmetry) for model, symmetry in zip(models, symmetries, strict=True)]
    watched = [_find_watched_layers(model, symmetry) for model, symmetry in zip(models, symmetries, strict=True)]
    grams: dict[Path, Tensor] = {}
    seen = False
    with evaluating(*models), torch.no_grad():
        own = list(zip(models, watched, symmetries, strict=True))
        scales = [_measure_scales(*each, batches) if standardize else None for each in own]
        for batch in batches:
            seen = True
            found = [_collect_by_path(*each, batch, scale) for each, scale in zip(own, scales, strict=True)]
            for path in found[0]:
                units = torch.cat([responses[path] for responses in found])
                units = units.to(torch.promote_types(units.dtype, torch.float32))  # sums overflow in half precision
                gram = (units @ units.T).double()
                grams[path] = grams[path].add_(gram) if path in grams else gram
    if not seen:
        raise InputError("no batch was seen; an iterator is exhausted after one pass: give a list or a data loader")
    for path, gram in grams.items():
        check_finite(gram, "/".join(path))
    return grams


def _copy_canonical(model: nn.Module, symmetry: Symmetry) -> nn.Module:
    copy = deepcopy(model)
    copy.load_state_dict(symmetry.canonical.of(model.state_dict()))
    return copy


def _find_watched_layers(model: nn.Module, symmetry: Symmetry) -> dict[str, AxisSegments]:
    """Return the layers whose output channels move, with the channels.

    The weight of a normalisation is constant in the canonical form; its channels are the inputs of its readers.
    """
    normalised = {
        str(norm.scale): symmetry.axes[norm.readers[0].weight][norm.readers[0].axis]
        for norm in symmetry.canonical.normalisations
        if norm.readers
    }
    found = {}
    for name, module in model.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if weight in normalised:
            found[name] = normalised[weight]
        elif (axis := output_axis(module)) is not None and weight in symmetry.axes:
            found[name] = symmetry.axes[weight][axis]
    return {name: channels for name, channels in found.items() if any(segment.atoms for segment in channels)}


def _run_layers(model: nn.Module, layers: Iterable[str], batch: InputsLike) -> dict[str, Tensor]:
    modules = dict(model.named_modules())
    found: dict[str, Tensor] = {}

    def keep(layer: str, output: Tensor) -> None:
        rows = channel_rows(modules[layer], output)
        # A copy: the next layer may change its input in place.
        found[layer] = torch.cat([found[layer], rows]) if layer in found else rows.clone()

    with hook_outputs(model, {layer: partial(keep, layer) for layer in layers}):
        forward(model, batch)
    return found


#: Layer -> mean and standard deviation of every channel.
_Scales = Mapping[str, tuple[Tensor, Tensor]]


def _measure_scales(
    model: nn.Module, layers: Mapping[str, AxisSegments], symmetry: Symmetry, batches: Iterable[InputsLike]
) -> _Scales:
    """Return mean and standard deviation of every channel of every layer.

    Channels that may be rotated share one standard deviation, since a rotation mixes them.
    """
    moments: dict[str, Moments] = {}
    for batch in batches:
        for layer, rows in _run_layers(model, layers, batch).items():
            moments.setdefault(layer, Moments()).add(rows)
    found = {layer: values.values for layer, values in moments.items()}
    for layer, axis in layers.items():
        if any(symmetry.atoms[atom].group != "permutation" for segment in axis for atom in segment.atoms):
            mean, std = found[layer]
            found[layer] = (mean, std.square().mean().sqrt().expand_as(std))
    return found


def _collect_by_path(
    model: nn.Module, layers: Mapping[str, AxisSegments], symmetry: Symmetry, batch: InputsLike, scales: _Scales | None
) -> dict[Path, Tensor]:
    """Return for every path the responses of a model's units, shape (m, samples of all its layers)."""
    found = _run_layers(model, layers, batch)
    if scales is not None:
        least = torch.finfo(torch.float32).tiny
        found = {layer: (rows - scales[layer][0]) / scales[layer][1].clamp_min(least) for layer, rows in found.items()}
    axes = {layer: (layers[layer], product(Factor(None, len(rows)))) for layer, rows in found.items()}
    layout = TermLayout.of(Symmetry(symmetry.atoms, axes))
    layout = replace(layout, terms=tuple(term for term in layout.terms if len(term.paths) == 1))
    arrays = layout.weights({layer: rows.T for layer, rows in found.items()})
    return {term.paths[0]: own for term, own in zip(layout.terms, arrays, strict=True)}


def _cholesky(gram: Tensor) -> Tensor:
    """Return the Cholesky factor of G + εI with the smallest possible ε of 1e-9, 1e-8, … tr(G)/m."""
    scale = max(float(gram.diagonal().mean()), torch.finfo(torch.float64).tiny)
    for power in range(-9, 3):
        shifted = gram + 10.0**power * scale * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        found = torch.linalg.cholesky_ex(shifted)
        if not found.info:
            factor: Tensor = found.L
            return factor
    raise InputError("the activations are too large to be matched by")
