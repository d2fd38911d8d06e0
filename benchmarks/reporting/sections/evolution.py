"""Search with few evaluations: what is merged, estimators, winners against what they cost, transfer, overhead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Part, Table, Text
from benchmarks.reporting.sections.evolution_estimates import estimates
from benchmarks.reporting.sections.evolution_transfer import transfer
from benchmarks.reporting.sections.evolution_winners import winners

#: What merging and machinery may cost over the questions, by the benchmark's own goal.
GOAL = 0.05
#: What the cards of the language models call their scores.
MEASURES = {
    "nll": "nats per token",
    "asdiv_exact": "exact on ASDiv, %",
    "format": "letter given, %",
    "exact": "right, %",
}


def section(record: str) -> Any:
    return partial(parts, record)


def parts(record: str, results: Mapping[str, Any]) -> Iterator[Part]:
    tuned = results.get("fine_tuning")
    models = f"LoRA fine-tunes of {_plain(tuned['base'])}" if tuned else "MiniLM text experts"
    yield Text(
        f"We search the weights of a merge of {', '.join(results['experts'])} ({models}) on a grid of "
        f"{results['winners']['grid']['size']} merges. Every merge has answered all {results['items']} items, so each "
        "estimate and each winner can be compared with the truth."
    )
    if tuned:
        yield from _fine_tuning(tuned)
    yield from _single(results)
    yield from estimates(record, results["estimates"])
    yield from winners(record, results)
    yield from transfer(results)
    yield _overhead(results["overhead"])


def _fine_tuning(tuned: Mapping[str, Any]) -> Iterator[Part]:
    """Scores before and after, and which experts did not get better at their own skill."""
    scores, scored = tuned["scores"], tuned["scored"]
    before = scores["base"]
    missed = [
        f"{expert}, {_measure(name)} ({_score(name, before[name])} → {_score(name, after[name])})"
        for expert, after in scores.items()
        for name in after
        if expert != "base" and name.split("_")[0] == expert and not _better(name, before[name], after[name])
    ]
    example = next(iter(tuned["training"].values()))
    found = f"Not better than the base at its own skill: {'; '.join(missed)}." if missed else "All own scores improved."
    yield Text(
        f"The base is {_plain(tuned['base'])}{', from a 4-bit file' if 'Q4' in tuned['base'] else ''}. The "
        f"fine-tunes are short: {example['steps']} steps of {example['batch']} examples, rank {example['rank']}. "
        f"They were scored on {scored} examples of each skill, so one more right answer is worth "
        f"{100 / scored:.1f} points. {found}"
    )
    rows = [[name, *(_score(each, own[each]) for each in before)] for name, own in scores.items()]
    columns = [f"{each.split('_')[0]}: {_measure(each)}" for each in before]
    yield Table(["model", *columns], rows, "Before (base) and after fine-tuning for each skill")


def _plain(model: str) -> str:
    """A model's name as its card has it, fit to stand in brackets itself."""
    return model.replace(" (", ", ").replace(")", "")


def _measure(name: str) -> str:
    kind = name.split("_", 1)[1]
    return MEASURES.get(kind, f"{kind.replace('_', ' ')}, %")


def _score(name: str, value: float) -> str:
    return f"{value:.2f}" if name.endswith("_nll") else percent(value, 2)


def _better(name: str, before: float, after: float) -> bool:
    return after < before if name.endswith("_nll") else after > before


def _single(results: Mapping[str, Any]) -> Iterator[Part]:
    single, experts = results["single"], results["experts"]
    worse = [
        f"{name} ({percent(single['base'][name])} → {percent(single[name][name])} %)"
        for name in experts
        if single[name][name] <= single["base"][name]
    ]
    if worse:
        yield Text(f"On these items, some experts are no better than the base at their own task: {'; '.join(worse)}.")
    each = results["items"] // len(experts)
    rows = [
        [name, *(percent(row[task]) for task in experts), percent(sum(row.values()) / len(row))]
        for name, row in single.items()
    ]
    yield Table(["model", *experts, "all"], rows, f"Items answered correctly before merging, %, {each} of each task")


def _overhead(overhead: Mapping[str, Any]) -> Text:
    few, full = overhead["machinery_and_merging_over_asking"], overhead["machinery_and_merging_over_asking_full"]
    met = [name for name, share in ((f"{overhead['n']} questions", few), ("a full evaluation", full)) if share <= GOAL]
    return Text(
        f"The overhead of a study is {1000 * overhead['machinery']:.1f} ms of processor time per trial: "
        f"{_share(overhead['machinery_over_asking'])} % of asking {overhead['n']} questions, and "
        f"{_share(overhead['machinery_over_asking_full'])} % of a full evaluation. Merging takes another "
        f"{1000 * overhead['merging']:.0f} ms; with it, the overhead is {_share(few)} % of {overhead['n']} questions "
        f"and {_share(full)} % of a full evaluation. The goal of {100 * GOAL:.0f} %, merging included, is met "
        f"{'for ' + ' and for '.join(met) if met else 'by neither'}."
    )


def _share(value: float) -> str:
    """Percent to two significant places, so that what is small does not become nothing."""
    return f"{100 * value:.2g}" if value < 0.1 else f"{100 * value:.0f}"
