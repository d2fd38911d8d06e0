"""Search with few evaluations: estimators, winners against what they cost, overhead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

#: What the items are of each kind of models.
MODELS = {"sentences": "MiniLM text experts", "questions": "LoRA fine-tunes of SmolLM2-135M"}


def section(record: str) -> Any:
    return partial(parts, record)


def parts(record: str, results: Mapping[str, Any]) -> Iterator[Part]:
    estimates, winners = results["estimates"], results["winners"]
    models = MODELS[results.get("models", "sentences")]
    yield Text(
        f"Weights of a merge of {', '.join(results['experts'])} ({models}), searched on a grid whose every merge was "
        f"evaluated on {results['items']} items, so that each estimate and each winner can be held against the truth."
    )
    yield from _estimates(record, estimates)
    yield from _winners(record, [each for each in (winners, results.get("larger")) if each])
    overhead = results["overhead"]
    yield Text(
        f"Overhead of the machinery: {1000 * overhead['machinery']:.1f} ms of processor a trial, "
        f"{percent(overhead['machinery_over_asking'])} % of asking {overhead['n']} questions and "
        f"{percent(overhead['machinery_over_asking_full'], 2)} % of a full evaluation. Merging takes "
        f"{1000 * overhead['merging']:.0f} ms more, which questions as short as these do not hide: "
        f"{percent(overhead['machinery_and_merging_over_asking'])} % with it, "
        f"{percent(overhead['machinery_and_merging_over_asking_full'])} % of a full evaluation."
    )


def _estimates(record: str, estimates: Mapping[str, Any]) -> Iterator[Part]:
    sizes = list(estimates["mae"])
    names = list(next(iter(estimates["mae"][sizes[0]].values())))
    naive = estimates["mae_of_the_endpoints_mean"]
    deviation = percent(estimates["score"]["spread"])
    yield Text(
        f"Estimated scores of {estimates['merges']} merges from few items, {estimates['draws']} subsets of each size; "
        f"their true scores have a standard deviation of {deviation} points, and the mean of the endpoints' scores, "
        f"which asks nothing, is off by {percent(naive, 2)}. That guess is hard to beat in absolute error; the rank "
        "correlation says whether an estimate can tell merges apart."
    )
    rows = []
    for size in sizes:
        for extractor, row in estimates["mae"][size].items():
            ranks = estimates["spearman"][size][extractor]
            best = min(row, key=lambda name: row[name])
            cells = [f"{percent(row[name], 2)} ({ranks[name]:.2f})" for name in names]
            marked = [f"**{cell}**" if name == best else cell for name, cell in zip(names, cells, strict=True)]
            rows.append([size, extractor, *marked])
    caption = "Mean absolute error in points (Spearman correlation), by number of items and how they are chosen"
    yield Table(["items", "chosen", *names], rows, caption)
    panels = [
        Lines(
            {name: [(int(size), estimates[key][size]["irt"][name]) for size in sizes] for name in names},
            Axis("items asked"),
            axis,
            "items chosen by IRT clustering",
            levels=levels,
        )
        for key, axis, levels in (
            ("mae", Axis("mean absolute error"), {"mean of the endpoints": naive}),
            ("spearman", Axis("rank correlation"), {}),
        )
    ]
    yield Figure(f"{record}_estimates", "Error and rank correlation of estimators by number of items", panels)
    rows = [
        [size, *(f"{value['euclidean']:.2f} ({value['cosine']:.3f})" for value in row.values())]
        for size, row in estimates["ability"].items()
    ]
    methods = list(next(iter(estimates["ability"].values())))
    yield Table(["items", *methods], rows, "Ability from few items against all: distance (1 − cosine)")


def _winners(record: str, searches: list[Mapping[str, Any]]) -> Iterator[Part]:
    grid, endpoints = searches[0]["grid"], searches[0]["endpoints"]
    yield Text(
        f"Winners of searches, scored on all items; means over {len(searches[0]['seeds'])} seeds. The best of "
        f"{grid['size']} merges has {percent(grid['best'])} %, their mean {percent(grid['mean'])} %, the best endpoint "
        f"{percent(max(endpoints.values()))} %. Savings are per candidate, and with the questions of "
        "calibration; a loss is within one error if it is no more than the bootstrap error of a full score."
    )
    for search in searches:
        yield _fitness(search)
    panels = [_reached(search) for search in searches]
    yield Figure(f"{record}_winners", "Score of the winner against questions asked", panels)


def _fitness(search: Mapping[str, Any]) -> Table:
    rows = [
        [
            name,
            percent(row["score"]),
            percent(row["test"]),
            percent(row["loss"]),
            "yes" if row["within_one_error"] else "no",
            f"{row['saved_per_candidate']:.1f}×",
            f"{row['saved']:.1f}×",
        ]
        for name, row in search["fitness"].items()
    ]
    columns = ["fitness", "score of the winner", "on unseen items", "lost to full evaluation", "within one error"]
    return Table([*columns, "fewer questions", "with calibration"], rows, f"Scores in %, {_size(search)}")


def _size(search: Mapping[str, Any]) -> str:
    return f"{search['generations']} generations of {search['population']}"


def _reached(search: Mapping[str, Any]) -> Lines:
    fitness = search["fitness"]
    kinds = list(dict.fromkeys(name.rsplit(" ", 1)[0] for name in fitness if name != "full"))
    lines = {
        kind: [(row["asked"], row["score"]) for name, row in fitness.items() if name.rsplit(" ", 1)[0] == kind]
        for kind in kinds
    }
    axes = Axis("questions asked of candidates", log=True), Axis("score of the winner", percent=True)
    levels = {"full evaluation": fitness["full"]["score"], "best endpoint": max(search["endpoints"].values())}
    return Lines(lines, *axes, _size(search), levels=levels)
