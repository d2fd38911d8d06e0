"""Survey where experts interfere: by matrix and block, with similarity, spectra and advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from merganser.checkpoints.opening import Reference
from merganser.checkpoints.tensor_names import block_of, natural_order, stack_of
from merganser.engine.geometry import cosines
from merganser.errors import InputError
from merganser.interference.advice import advise
from merganser.interference.records import FRACTIONS, BlockInterference, MatrixInterference, Survey
from merganser.interference.sti import Overlap, full_rank_procrustes, square_procrustes
from merganser.interference.task_matrices import TaskMatrices, open_task_matrices
from merganser.kernels.spectra import effective_rank
from merganser.library.library import Library
from merganser.library.unfolding import is_matrix
from merganser.methods.matrices import FLOOR, matrix_shape, rank_kept
from merganser.plain import float_rows


def survey(
    base: Reference | Library,
    experts: Mapping[str, Reference] | Sequence[str] | None = None,
    *,
    rank_fraction: float | None = None,
    full_rank: bool = False,
    layers: int | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Survey:
    """Measure where experts interfere and give advice.

    Convolution kernels count as matrices of shape (output, input · window). Sides of 512 and more are decomposed in
    float32 where that keeps three digits of every figure, else in float64.

    Args:
        base: The base of the experts, or a library of them.
        experts: The experts by name; the names of some, or nothing, for a library.
        rank_fraction: The share of singular components to compare; 1/T by default, as in TSV-Merge.
        full_rank: Also measure the Procrustes error of whole bases on the long side of every matrix, which is slow.
        layers: Measure at most this many layers of a stack, evenly spread from first to last; all by default. Cosines
            are those of whole task vectors in any case.
        on_progress: Called with the matrices done, those in all, and the name of the next.

    Returns:
        The survey, with matrices in natural order.

    Raises:
        InputError: If an argument is out of range, or the experts do not fit the base.

    Example:
        >>> survey = mg.interference.survey(base, experts)
        >>> worst = max(survey.blocks, key=lambda block: block.normalized).block
    """
    if rank_fraction is not None and not 0 < rank_fraction <= 1:
        raise InputError(f"rank_fraction must be in (0, 1], got {rank_fraction}")
    if layers is not None and layers < 1:
        raise InputError(f"layers must be at least 1, got {layers}")
    source = open_task_matrices(base, experts)
    products = torch.zeros(len(source.names), len(source.names), dtype=torch.float64)
    matrices: list[MatrixInterference] = []
    tensors = sorted(source.tensors(), key=lambda item: natural_order(item[0]))
    sampled = sample_layers([name for name, spec in tensors if is_matrix(spec.shape)], layers)
    blocks_of = {stack: names for stack, (names, _) in sampled.items()}
    wanted = [
        name
        for name, spec in tensors
        if is_matrix(spec.shape) and (block := block_of(name)) in blocks_of.get(stack_of(block), (block,))
    ]
    number = {name: place for place, name in enumerate(wanted)}
    for name, _ in tensors:
        if name in number:
            on_progress(number[name], len(wanted), name)
        products += (own := source.inner_products(name))
        if name in number and bool(own.any()):
            matrices.append(_measure(name, source, rank_fraction, full_rank))
    found = Survey(
        tuple(source.names),
        tuple(matrices),
        _group_by_block(matrices),
        tuple(products.diagonal().sqrt().tolist()),
        float_rows(cosines(products.numpy())),
        float_rows(_mean([torch.tensor(matrix.pairs) for matrix in matrices], len(source.names))),
        source.truncated,
        left_out={name: names for name, names in source.left_out().items() if names},
        layers=sampled,
    )
    return replace(found, advice=advise(found))


def sample_layers(names: Sequence[str], most: int | None) -> dict[str, tuple[tuple[str, ...], int]]:
    """Choose layers of every stack that has more than `most`: their names, and how many there are.

    Args:
        names: Names of tensors, in natural order.
        most: How many layers of a stack to choose, evenly spread from the first to the last; None for all.

    Returns:
        The choice for every stack that has more.

    Example:
        >>> sample_layers([f"layers.{i}.weight" for i in range(9)], 3)
        {'layers': (('layers.0', 'layers.4', 'layers.8'), 9)}
    """
    stacks: dict[str, dict[str, None]] = {}
    for name in names:
        block = block_of(name)
        if (stack := stack_of(block)) != block:
            stacks.setdefault(stack, {})[block] = None
    chosen = {}
    for stack, found in stacks.items():
        blocks = list(found)
        if most is not None and len(blocks) > most:
            last = len(blocks) - 1
            places = sorted({round(i * last / max(1, most - 1)) for i in range(most)})
            chosen[stack] = (tuple(blocks[place] for place in places), len(blocks))
    return chosen


def similarity(
    base: Reference | Library, experts: Mapping[str, Reference] | Sequence[str] | None, name: str, rank: int
) -> tuple[Tensor, Tensor]:
    """Return |UᵀU| and |VᵀV| of the top `rank` task singular vectors of one matrix: heat maps with one block per
    task.
    """
    overlap = Overlap.of(open_task_matrices(base, experts).factors(name, rank))
    return overlap.left.abs(), overlap.right.abs()


def _measure(name: str, source: TaskMatrices, rank_fraction: float | None, full_rank: bool) -> MatrixInterference:
    shape = matrix_shape(source.base.spec(name).shape)
    n, tasks = min(shape), len(source.names)
    k = rank_kept(n, tasks, rank_fraction)
    decomposed = source.decomposed(name, k)
    spectra = [values for values, _ in decomposed]
    energies = [values.square() for values in spectra]
    totals = [float(energy.sum()) for energy in energies]
    overlap = Overlap.of([factors for _, factors in decomposed], orthonormal=not source.truncated)

    def kept(rank: int) -> tuple[float, ...]:
        return tuple(float(e[:rank].sum()) / total if total else 1.0 for e, total in zip(energies, totals, strict=True))

    curves = [kept(rank_kept(n, 1, share)) for share in FRACTIONS]
    return MatrixInterference(
        name=name,
        block=block_of(name),
        shape=shape,
        rank=k,
        sti=overlap.interference(),
        normalized=overlap.normalized(),
        chance=overlap.chance(),
        sti_after=overlap.after_merging(),
        procrustes=overlap.procrustes(),
        procrustes_full=_procrustes_full(name, source, spectra, full_rank),
        effective_rank=tuple(effective_rank(values) for values in spectra),
        energy=kept(k),
        energy_curve=tuple(zip(*curves, strict=True)),
        pairs=float_rows(overlap.pairs()),
    )


def _procrustes_full(
    name: str, source: TaskMatrices, spectra: Sequence[Tensor], measure: bool
) -> tuple[float | None, float | None]:
    d, m = matrix_shape(source.base.spec(name).shape)
    n = min(d, m)
    if measure:
        whole = source.factors(name, n)
        return full_rank_procrustes([f.u for f in whole]), full_rank_procrustes([f.v for f in whole])
    whole_rank = all(s.numel() == n and bool(s[-1] > FLOOR * s[0]) for s in spectra)
    known = square_procrustes(n, len(spectra)) if whole_rank else None
    return (known if d == n else None), (known if m == n else None)


def _group_by_block(matrices: Sequence[MatrixInterference]) -> tuple[BlockInterference, ...]:
    groups: dict[str, list[MatrixInterference]] = {}
    for matrix in matrices:
        groups.setdefault(matrix.block, []).append(matrix)
    return tuple(
        BlockInterference(
            block,
            len(group),
            sum(matrix.sti for matrix in group),
            sum(matrix.normalized for matrix in group) / len(group),
            sum(matrix.chance for matrix in group) / len(group),
            sum(matrix.sti_after for matrix in group),
        )
        for block, group in groups.items()
    )


def _mean(tables: Sequence[Tensor], size: int) -> Tensor:
    return torch.stack(list(tables)).mean(dim=0) if tables else torch.zeros(size, size)
