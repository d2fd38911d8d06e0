"""Turn measurements into advice. The thresholds are rules of thumb, explained where they are defined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from merganser.interference.records import FRACTIONS, Advice, BlockInterference, MatrixInterference, Survey

#: Above this cosine, two task vectors are almost the same expert.
TWINS = 0.7
#: Below this cosine, two task vectors cancel each other in a sum.
OPPOSED = -0.1
#: Interference relative to chance that is worth reporting; below it a pair looks unrelated.
COLLIDING = 1.5
#: Below these, plain sums lose little compared with orthogonalised ones.
CALM_COSINE, CALM_INTERFERENCE = 0.05, 1.1
#: A task vector this many times as long as the shortest dominates a merge.
UNEQUAL = 2.0
#: Share of the energy that a rank should keep.
ENOUGH = 0.95


def advise(survey: Survey) -> tuple[Advice, ...]:
    """Return which experts of a survey interfere, where, and which method and rank to try. Of truncated experts,
    energies are shares of what a library stored.
    """
    experts, matrices = survey.experts, survey.matrices
    if len(experts) < 2 or not matrices:
        return ()
    couples = [(a, b) for a in range(len(experts)) for b in range(a)]
    found = [*_advise_on_norms(experts, survey.norms), *_advise_on_couples(survey, couples)]
    usual = _mean(matrix.pair_chance for matrix in matrices)
    loud = {(a, b): survey.pairs[a][b] for a, b in couples if survey.pairs[a][b] > COLLIDING * usual}
    for a, b in sorted(loud, key=lambda couple: -loud[couple])[:3]:
        text = (
            f"{experts[b]} and {experts[a]} interfere {loud[a, b] / usual:.1f} times as much as unrelated "
            f"experts would, most in {_advise_on_loudest(matrices, a, b)}"
        )
        found.append(Advice("collision", text, (experts[b], experts[a])))
    energy = "the energy that the library holds of a matrix" if survey.truncated else "the energy of a matrix"
    return (
        *found,
        _locate_interference(survey.blocks),
        _advise_on_method(survey, couples, bool(loud), energy),
        _advise_on_rank(matrices, len(experts), energy),
    )


def _advise_on_norms(experts: Sequence[str], norms: Sequence[float]) -> list[Advice]:
    found = []
    if still := [name for norm, name in zip(norms, experts, strict=True) if norm == 0]:
        told = f"{', '.join(still)} {'does' if len(still) == 1 else 'do'} not differ from the base"
        found.append(Advice("norms", f"{told}: leave {'it' if len(still) == 1 else 'them'} out", tuple(still)))
    moved = sorted((norm, name) for norm, name in zip(norms, experts, strict=True) if norm > 0)
    if moved and moved[-1][0] > UNEQUAL * moved[0][0]:
        (short, shortest), (long, longest) = moved[0], moved[-1]
        text = (
            f"the task vector of {longest} is {long / short:.1f} times as long as that of {shortest} ({long:.3g} and "
            f"{short:.3g}) and would dominate the merge: try `norms: equal`, or give {longest} a smaller weight"
        )
        found.append(Advice("norms", text, (shortest, longest)))
    return found


def _advise_on_couples(survey: Survey, couples: Sequence[tuple[int, int]]) -> list[Advice]:
    found = []
    for a, b in couples:
        value, names = survey.cosine[a][b], (survey.experts[b], survey.experts[a])
        if value >= TWINS:
            text = f"{names[0]} and {names[1]} are near-twins (cosine {value:.2f}): average them first, or keep one"
            found.append(Advice("twins", text, names))
        elif value <= OPPOSED:
            text = f"{names[0]} and {names[1]} oppose each other (cosine {value:.2f}): any sum weakens both"
            found.append(Advice("opposed", text, names))
    return found


def _advise_on_loudest(matrices: Sequence[MatrixInterference], a: int, b: int) -> str:
    sums: dict[str, float] = {}
    for matrix in matrices:
        sums[matrix.block] = max(sums.get(matrix.block, 0.0), matrix.pairs[a][b])
    return ", ".join(sorted(sums, key=lambda block: -sums[block])[:2])


def _locate_interference(blocks: Sequence[BlockInterference]) -> Advice:
    """Return the blocks furthest above chance, or that there are none."""
    top = sorted(blocks, key=lambda block: -above_chance(block))[:3]
    ratios = {block.block: above_chance(block) for block in top}
    above = [f"{block} ({ratio:.1f}× chance)" for block, ratio in ratios.items() if ratio >= CALM_INTERFERENCE]
    if above:
        return Advice("where", f"interference is highest in {', '.join(above)}")
    most = f"{above_chance(top[0]):.2f}× chance, in {top[0].block}"
    return Advice("where", f"no block interferes clearly more than unrelated experts would (at most {most})")


def _advise_on_method(survey: Survey, couples: Sequence[tuple[int, int]], loud: bool, energy: str) -> Advice:
    alike = _mean(abs(survey.cosine[a][b]) for a, b in couples)
    level = _mean(map(above_chance, survey.matrices))
    kept = _mean(value for matrix in survey.matrices for value in matrix.energy)
    measured = f"mean |cosine| {alike:.2f}, interference {level:.1f}× chance"
    if alike < CALM_COSINE and level < CALM_INTERFERENCE and not loud:
        return Advice(
            "method", f"the experts hardly overlap ({measured}): task_arithmetic may suffice; use tsv to be sure"
        )
    if kept < 0.5:
        return Advice(
            "method",
            f"the experts overlap ({measured}) and the rank used keeps only {kept:.0%} of {energy} "
            "(mean over matrices): try iso_c, which truncates nothing, beside tsv",
        )
    return Advice("method", f"the experts overlap ({measured}): try tsv with scale 1.0, then iso_c with 1.0 to 1.5")


def _advise_on_rank(matrices: Sequence[MatrixInterference], experts: int, energy: str) -> Advice:
    curve = [
        _mean(expert[index] for matrix in matrices for expert in matrix.energy_curve) for index in range(len(FRACTIONS))
    ]
    kept = _mean(value for matrix in matrices for value in matrix.energy)
    enough = next((share for share, value in zip(FRACTIONS, curve, strict=True) if value >= ENOUGH), FRACTIONS[-1])
    text = (
        f"the rank used keeps {kept:.0%} of {energy} (mean over matrices, each counting the same); "
        f"{ENOUGH:.0%} needs a rank_fraction of {enough:g}"
    )
    if enough * experts > 1:
        text += f", but {experts} experts share the space without crowding only up to {1 / experts:.2g}"
    return Advice("rank", text)


def above_chance(measured: MatrixInterference | BlockInterference) -> float:
    """Return the normalised interference as a multiple of that of random matrices; 0 if there can be none."""
    return measured.normalized / measured.chance if measured.chance > 0 else 0.0


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / max(1, len(numbers))
