"""Find exactly the k largest of n streamed scores, without sorting them.

A sample brackets the k-th largest score; one pass counts the scores above the bracket and collects the few inside,
among which it is selected exactly. If the bracket misses, histograms of the scores' bits narrow it down. Ties are
broken by position: the first ones are kept.

Scores are non-negative floats, so they are ordered like their bit patterns read as integers; all comparisons use these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from merganser.kernels.recording import Lane, NotRecordable
from merganser.kernels.spheres import nonzero
from merganser.kernels.tiles import Results
from merganser.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

T = TypeVar("T")
Bits: TypeAlias = "npt.NDArray[Any]"

#: Fewer scores than this are collected completely.
SMALL = 1 << 20
#: Stride of a sample, odd lest it sees the same columns of every row, and the number of scores it takes.
_SAMPLED = 33
_TAKEN = 1 << 15
#: Maximum share of a block's scores that is collected.
_SHARE = 1 / 8
#: Bits determined by a pass of histograms, and the number of scores that may remain to be collected.
_RADIX = 11
_LEFT = 1 << 24


class Stream(Protocol):
    """Blocks of scores in a fixed order, readable any number of times, possibly in parallel."""

    def map(self, function: Callable[[Any], T], only: int | None = None, stride: int = 1) -> list[T]:
        """Apply `function` to every block, or to one alone. With a stride, use a sample of about one in `stride`
        entries: a part of every block, or whole blocks.
        """
        ...


def chosen(count: int, only: int | None = None, stride: int = 1) -> Sequence[int]:
    """Return the blocks that `Stream.map` uses, of `count`, if a sample consists of whole blocks."""
    if only is not None:
        return [only]
    some = count if stride == 1 else min(count, max(4, count // stride))
    return [(2 * j + 1) * count // (2 * some) for j in range(some)]


@dataclass(frozen=True)
class Cutoff:
    """Separates the k largest scores: above `value`, or equal to it at a flat index below `index`."""

    value: float
    index: int

    def shrink_(self, values: Tensor, offset: int) -> Tensor:
        """Zero the entries whose magnitude is not kept, in place; `offset` is the flat index of the first one."""
        if isinstance(values, Lane):
            below = _below(self.value, np.float32)
            return values.become(values.note("SHRINK", x=below, y=self.value, place=self.index))
        flat = values.view(-1)
        size = flat.numel()
        ties = min(max(self.index - offset, 0), size)
        if ties:
            kind = np.float64 if values.dtype == torch.float64 else np.float32
            _hardshrink_(flat[:ties], _below(self.value, kind))
        if ties < size:
            _hardshrink_(flat[ties:], self.value)
        return values

    def mask(self, scores: Tensor, offset: int) -> Tensor:
        """Return 1 where a positive score is kept, 0 elsewhere, in the dtype of the scores."""
        return self.shrink_(scores.clone(), offset).sign_()


def _hardshrink_(values: Tensor, bound: float) -> None:
    torch.ops.aten.hardshrink.out(values, bound, out=values)


def _below(value: float, kind: type[np.floating[Any]]) -> float:
    """Return the next smaller number of this type, so that hardshrink's |x| > bound means |x| ≥ value."""
    return float(np.nextafter(kind(value), kind(-math.inf)))


def largest(
    blocks: Stream, scores: Callable[[Any], Sequence[Tensor]], keep: Sequence[Sequence[int]], numel: int
) -> list[list[Cutoff]]:
    """Return the cutoffs of the k largest, for every k in `keep[i]`, of the i-th of the `scores` of each block.

    `numel` is the number of entries of each score over all blocks. The `value` of a cutoff is the k-th largest
    score, so this finds quantiles too.
    """
    found = {
        (i, k): Cutoff(math.inf, 0) if k <= 0 else Cutoff(0.0, numel)
        for i, counts in enumerate(keep)
        for k in counts
        if k <= 0 or k >= numel
    }
    wanted = [(i, k) for i, counts in enumerate(keep) for k in dict.fromkeys(counts) if (i, k) not in found]
    if wanted:
        cutoffs = _directly(blocks, scores, wanted) if numel <= SMALL else _Search(blocks, scores, numel).run(wanted)
        found |= dict(zip(wanted, cutoffs, strict=True))
    return [[found[i, k] for k in counts] for i, counts in enumerate(keep)]


def largest_share(blocks: Stream, scores: Callable[[Any], Tensor], share: float, numel: int) -> Cutoff:
    """Return the cutoff of the k largest scores, k = ⌊`share` · the number of positive ones⌋.

    The positive scores are counted in the pass that looks for the cutoff.
    """
    if numel <= SMALL:
        keep = int(sum(blocks.map(lambda block: nonzero(scores(block)))) * share)
        return largest(blocks, lambda block: [scores(block)], [[keep]], numel)[0][0]
    search = _Search(blocks, lambda block: [scores(block)], numel)
    drawn = search.draw()
    positive = sum(np.count_nonzero(block[0]) for block in drawn) / sum(block[0].size for block in drawn)
    brackets = search.brackets(drawn, [(0, round(share * positive * numel))])
    found = blocks.map(lambda block: (search.part(score := scores(block), brackets[0]), nonzero(score)))
    keep = int(sum(count for _, count in found) * share)
    if not 0 < keep < numel:
        return Cutoff(math.inf, 0) if keep <= 0 else Cutoff(0.0, numel)
    cutoff = search.resolve(0, keep, brackets[0], [part for part, _ in found])
    return cutoff or search.narrow([(0, keep)], search.histograms([(0, keep)]))[0]


def _directly(
    blocks: Stream, scores: Callable[[Any], Sequence[Tensor]], wanted: Sequence[tuple[int, int]]
) -> list[Cutoff]:
    """Return cutoffs of few scores, all in memory."""
    parts = blocks.map(lambda block: [_bits(score) for score in scores(block)])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    cutoffs = []
    for i, k in wanted:
        bits = columns[i]
        value = np.partition(bits, bits.size - k)[bits.size - k]
        equal = np.flatnonzero(bits == value)
        ties = k - int(np.count_nonzero(bits > value))
        index = bits.size if ties == equal.size else int(equal[ties - 1]) + 1
        cutoffs.append(Cutoff(float(value.view(_float(value.dtype.type))), index))
    return cutoffs


@dataclass(frozen=True)
class _Bracket:
    """Scores from `low` to `high`, as integers. The number collected is limited unless `final`."""

    low: int
    high: int
    final: bool


@dataclass(frozen=True)
class _Part:
    """One block's part of a bracket: the scores strictly inside, and how many are above and on its ends.

    The ends come from a sample, so that frequent values are on them and are counted, not collected.
    """

    size: int
    above: int
    highs: int
    inside: Bits
    lows: int
    overflow: bool


class _Search:
    def __init__(self, blocks: Stream, scores: Callable[[Any], Sequence[Tensor]], numel: int) -> None:
        self.blocks = blocks
        self.scores = scores
        self.numel = numel

    def run(self, wanted: Sequence[tuple[int, int]]) -> list[Cutoff]:
        return self.narrow(wanted, self.brackets(self.draw(), wanted))

    def narrow(self, wanted: Sequence[tuple[int, int]], brackets: list[_Bracket]) -> list[Cutoff]:
        """Return the cutoffs; brackets that miss theirs are replaced."""
        while True:
            parts = list(zip(*self.scan([i for i, _ in wanted], brackets), strict=True))
            cutoffs = [self.resolve(i, k, b, p) for (i, k), b, p in zip(wanted, brackets, parts, strict=True)]
            missed = [j for j, cutoff in enumerate(cutoffs) if cutoff is None]
            if not missed:
                return [cutoff for cutoff in cutoffs if cutoff is not None]
            for j, bracket in zip(missed, self.histograms([wanted[j] for j in missed]), strict=True):
                brackets[j] = bracket

    def draw(self) -> list[list[Bits]]:
        """Return a few scores of a few blocks."""
        drawn = self.blocks.map(lambda block: [_bits(score) for score in self.scores(block)], stride=_SAMPLED)
        step = (
            sum(block[0].size for block in drawn) // _TAKEN | 1
        )  # odd, so that not every row contributes the same columns
        self.kind = drawn[0][0].dtype.type
        self.top = int(np.iinfo(self.kind).max)
        return [[bits[::step] for bits in block] for block in drawn]

    def brackets(self, drawn: Sequence[Sequence[Bits]], wanted: Sequence[tuple[int, int]]) -> list[_Bracket]:
        """Return brackets from a sample, as wide as its scatter within and between blocks requires."""
        brackets = []
        for i, k in wanted:
            parts = [blocks[i] for blocks in drawn]
            pool = np.sort(np.concatenate(parts))
            share = k / self.numel
            middle = pool[-max(1, round(share * pool.size))]
            shares = [np.count_nonzero(part >= middle) / max(1, part.size) for part in parts]
            scatter = math.hypot(
                math.sqrt(share * (1 - share) / pool.size), float(np.std(shares)) / math.sqrt(len(drawn))
            )
            width = math.ceil((4 * scatter) * pool.size) + 2
            place = pool.size - round(share * pool.size)
            low = int(pool[place - width]) if place >= width else 0
            high = int(pool[place + width]) if place + width < pool.size else self.top
            brackets.append(_Bracket(low, high, final=False))
        return brackets

    def scan(self, columns: Sequence[int], brackets: Sequence[_Bracket]) -> list[list[_Part]]:
        """Make one pass and return a part for each block and bracket."""

        def over(block: Any) -> list[_Part]:
            scores = self.scores(block)
            return [self.part(scores[i], bracket) for i, bracket in zip(columns, brackets, strict=True)]

        return self.blocks.map(over)

    def part(self, score: Tensor, bracket: _Bracket) -> _Part:
        if isinstance(score, Lane):
            if bracket.final:
                raise NotRecordable("a scan without a bound on what it collects")
            found: _Part = score.recording.end(
                "SCAN", partial(_read_part, bracket), score, low=bracket.low, high=bracket.high
            )
            return found
        bits = _bits(score)
        low, high = self.kind(bracket.low), self.kind(bracket.high)
        nothing = np.empty(0, bits.dtype)  # an empty view would keep the whole block in memory
        above = int(np.count_nonzero(bits > high))
        lows = int(np.count_nonzero(bits == low))
        if bracket.high - bracket.low < 2:
            highs = int(np.count_nonzero(bits == high)) if high > low else 0
            return _Part(bits.size, above, highs, nothing, lows, overflow=False)
        highs = int(np.count_nonzero(bits == high))
        # One comparison: unsigned distances from low + 1 are small only for values inside.
        unsigned = np.dtype(f"u{bits.dtype.itemsize}").type
        within = bits.view(unsigned) - unsigned(bracket.low + 1) < unsigned(bracket.high - bracket.low - 1)
        overflow = not bracket.final and int(np.count_nonzero(within)) > _SHARE * bits.size
        inside = nothing if overflow else np.compress(within, bits)
        return _Part(bits.size, above, highs, inside, lows, overflow)

    def resolve(self, column: int, keep: int, bracket: _Bracket, parts: Sequence[_Part]) -> Cutoff | None:
        """Return the cutoff, unless it is outside the bracket or more scores are inside than were collected."""
        rank = keep - sum(part.above for part in parts)
        highs, lows = sum(part.highs for part in parts), sum(part.lows for part in parts)
        inside = np.concatenate([part.inside for part in parts])
        if any(part.overflow for part in parts) or not 1 <= rank <= highs + inside.size + lows:
            return None
        if rank <= highs:
            value, equal = bracket.high, [part.highs for part in parts]
        elif rank > highs + inside.size:
            value, equal, rank = bracket.low, [part.lows for part in parts], rank - highs - inside.size
        else:
            place = inside.size - (rank - highs)
            value = int(np.partition(inside, place)[place])
            equal = [int(np.count_nonzero(part.inside == value)) for part in parts]
            rank -= highs + int(np.count_nonzero(inside > value))
        number = float(np.array(value, self.kind).view(_float(self.kind)))
        return Cutoff(number, self.position(column, value, rank, equal, [part.size for part in parts]))

    def position(self, column: int, value: int, ties: int, equal: Sequence[int], sizes: Sequence[int]) -> int:
        """Return the flat index below which exactly `ties` scores equal `value`; reads one block again."""
        if ties == sum(equal):
            return self.numel
        block, offset = 0, 0
        while ties > equal[block]:
            ties -= equal[block]
            offset += sizes[block]
            block += 1
        (bits,) = self.blocks.map(lambda group: _bits(self.scores(group)[column]), only=block)
        places = np.flatnonzero(bits == value)
        return offset + int(places[ties - 1]) + 1

    def histograms(self, wanted: Sequence[tuple[int, int]]) -> list[_Bracket]:
        """Return brackets that cannot miss: the scores that share the leading bits of the k-th largest.

        A pass determines a few bits, until few enough scores are left or all bits are known.
        """
        ranks = [k for _, k in wanted]
        prefixes = [0] * len(wanted)
        shift = self.top.bit_length()
        limit = max(SMALL, min(_LEFT, int(self.numel * _SHARE)))
        sizes = [self.numel] * len(wanted)
        while shift > 0 and max(sizes) > limit:
            before, shift = shift, max(0, shift - _RADIX)

            def over(block: Any, before: int = before, shift: int = shift) -> list[Bits]:
                scores = self.scores(block)
                counts = []
                for (i, _), prefix in zip(wanted, prefixes, strict=True):
                    heads = _bits(scores[i]) >> self.kind(shift)
                    radix = 1 << (before - shift)
                    own = heads - self.kind(prefix << (before - shift))
                    counts.append(np.bincount(own[(own >= 0) & (own < radix)], minlength=radix).astype(np.int32))
                return counts

            for j, parts in enumerate(zip(*self.blocks.map(over), strict=True)):
                counts = np.asarray(parts).sum(axis=0, dtype=np.int64)[::-1]
                below = np.cumsum(counts)
                place = int(np.searchsorted(below, ranks[j]))
                ranks[j] -= int(below[place] - counts[place])
                prefixes[j] = (prefixes[j] << (before - shift)) + counts.size - 1 - place
                sizes[j] = int(counts[place])
        if shift == 0:
            return [_Bracket(prefix, prefix, final=True) for prefix in prefixes]
        return [_Bracket((p << shift) - 1, min((p + 1) << shift, self.top), final=True) for p in prefixes]


def _float(integer: Any) -> Any:
    """Return the floating type whose bits are integers of this type."""
    return np.float64 if integer is np.int64 else np.float32


def _read_part(bracket: _Bracket, number: int, results: Results) -> _Part:
    """Return the result of the compiled scan, which has room for more than may be collected."""
    above, highs, lows, inside = map(int, results.counts[number])
    overflow = inside > _SHARE * results.size
    kept = results.kept[number, : 0 if overflow else inside].view(np.int32).copy()
    return _Part(results.size, above, highs if bracket.high > bracket.low else 0, kept, lows, overflow)


def _bits(score: Tensor) -> Bits:
    if isinstance(score, Lane):
        taken: Bits = score.recording.end("TAKE", lambda number, found: found.scores(number), score)
        return taken
    wide = torch.int64 if score.dtype == torch.float64 else torch.int32
    bits: Bits = score.reshape(-1).view(wide).cpu().numpy()
    return bits
