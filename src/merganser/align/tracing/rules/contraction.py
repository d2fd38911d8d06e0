"""Sums of products: linear maps, matrix products, einsum, attention. All are `einsum` here."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

from merganser.align.tracing.calls import Call, OutputAxes, Unsupported, rule
from merganser.align.tracing.dims import ONE, Axes, Dim, factors, merge, pin
from merganser.align.tracing.rules.pointwise import broadcast
from merganser.align.tracing.unification import split, unify


def einsum(call: Call, operands: Sequence[Sequence[Dim]], subscripts: Sequence[str], output: str) -> Axes:
    """Axes of one letter are the same. A letter o may index units of a letter x only if it is wherever x is."""
    axes: dict[str, Dim] = {}
    present = [
        {letter for letter, dim in zip(letters, dims, strict=True) if dim.size != 1}
        for letters, dims in zip(subscripts, operands, strict=True)
    ]
    for letters, dims in zip(subscripts, operands, strict=True):
        for letter, dim in zip(letters, dims, strict=True):
            if dim.size != 1:
                unify(axes.setdefault(letter, dim), dim)
    tensors: list[set[str]] = [*present, set(output) & set(axes)]
    for child in axes:
        holders = [letters for letters in tensors if child in letters]
        away = set(axes).difference(holders[0].intersection(*holders))
        call.forbid([axes[parent] for parent in away], [axes[child]])
    return Axes(axes.get(letter, ONE) for letter in output)


@rule("linear")
def linear(call: Call) -> OutputAxes:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    batch = ascii_letters[: len(x) - 1]
    result = einsum(call, [x, weight], [batch + "Y", "ZY"[-len(weight) :]], batch + "Z"[: len(weight) - 1])
    return broadcast([result, bias]) if bias is not None else result


@rule("matmul", "mm", "bmm", "mv", "dot")
def matmul(call: Call) -> OutputAxes:
    a, b = call.tensors
    return _matmul(call, a, b)


def _matmul(call: Call, a: Axes, b: Axes) -> Axes:
    rank = max(len(a), len(b)) - 2
    batch = ascii_letters[: max(rank, 0)]
    left = (batch + "XY")[-len(a) :] if len(a) > 1 else "Y"
    right = (batch + "YZ")[-len(b) :] if len(b) > 1 else "Y"
    rows, columns = "X" * (len(a) > 1), "Z" * (len(b) > 1)
    return einsum(call, [a, b], [left, right], batch + rows + columns)


@rule("addmm", "addmv", "baddbmm")
def add_matmul(call: Call) -> OutputAxes:
    added, a, b = call.tensors
    return broadcast([_matmul(call, a, b), added])


@rule("einsum")
def general(call: Call) -> OutputAxes:
    equation = call["equation"].replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    operands: list[Axes] = call["tensors"]
    subscripts = inputs.split(",")
    spare = [letter for letter in ascii_letters if letter not in equation]
    widths = [len(dims) - len(s.replace("...", "")) for s, dims in zip(subscripts, operands, strict=True)]
    widest = max((w for w, s in zip(widths, subscripts, strict=True) if "..." in s), default=0)
    dots = "".join(spare[:widest])
    expanded = [s.replace("...", dots[widest - w :] if w else "") for s, w in zip(subscripts, widths, strict=True)]
    if not arrow:
        letters = "".join(expanded)
        output = "..." + "".join(sorted(c for c in set(letters) - set(dots) if letters.count(c) == 1))
    if any(len(set(s)) != len(s) for s in expanded):
        raise Unsupported
    return einsum(call, operands, expanded, output.replace("...", dots))


@rule("scaled_dot_product_attention")
def attention(call: Call) -> OutputAxes:
    """softmax(QKᵀ)V for each head. With fewer kv heads, each serves a group: query heads are (kv head, in group)."""
    query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    if call["is_causal"]:
        pin(query[-2], key[-2])
    batch = ascii_letters[: len(query) - 2]
    heads, shared = batch, batch
    q: Sequence[Dim] = query
    m: Sequence[Dim] = mask if mask is not None else ()
    if call.arguments.get("enable_gqa") and query[-3].size != key[-3].size:
        kv = key[-3].size
        grouped = split(query[-3], (kv, query[-3].size // kv))
        q = [*query[:-3], *grouped, *query[-2:]]
        if len(m) > 2:
            m = [*m[:-3], *(split(m[-3], (kv, grouped[1].size)) if m[-3].size != 1 else (ONE, ONE)), *m[-2:]]
        heads = batch + "G"
    scores = einsum(call, [q, key], [heads + "LE", shared + "SE"], heads + "LS")
    for place, factor in enumerate(factors(query[-3]) if len(query) > 3 else ()):
        call.hint(factor, "query" if place else "head")
    call.hint(key[-1], "d_qk")
    call.hint(value[-1], "d_v")
    scores = broadcast([scores, m])
    call.forbid([scores[-1]], scores[:-1])
    result = einsum(call, [scores, value], [heads + "LS", shared + "SV"], heads + "LV")
    if heads == batch:
        return result
    return Axes([*result[:-4], merge(result[-4:-2]), *result[-2:]])


@rule("bilinear")
def bilinear(call: Call) -> OutputAxes:
    a, b, weight, bias = call["input1"], call["input2"], call["weight"], call["bias"]
    batch = ascii_letters[: len(a) - 1]
    result = einsum(call, [a, weight, b], [batch + "X", "ZXY", batch + "Y"], batch + "Z")
    return broadcast([result, bias]) if bias is not None else result
