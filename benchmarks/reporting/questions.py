"""The ten questions a stranger asks: each answered by one sentence, one figure and one command.

Sentences are made from stored results, so that they change with what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks import answers
from benchmarks.reporting.formats import mebibytes, percent
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines
from benchmarks.reporting.sections import compression, evolution_racing, mergeability, multi_task
from benchmarks.reporting.sections.speed import LIMIT

#: A sentence, and the figure that shows it: one that a section draws, by its name, or one of its own.
Answer = tuple[str, str | Figure]


@dataclass(frozen=True)
class Question:
    """A question, the record that answers it (not if it lacks what the answer needs), and what a user types.

    The answer takes the results of that record and, where they are stored, those of the record `beside` it.
    """

    title: str
    record: str
    answer: Callable[..., Answer | None]
    command: str
    beside: str = ""


def keeps_most(results: Mapping[str, Any]) -> Answer:
    sheet = next(iter(multi_task.sheets(results).values()))
    best, tied = sheet.best(), sheet.tied()
    gain = answers.difference(sheet.merges[best], sheet.merges[multi_task.SUM], sheet.experts)
    also = f", with {multi_task.listing(tied)} not clearly behind" if tied else ""
    sentence = (
        f"{best}{also}. A merge of {sheet.count} text experts keeps {percent(sheet.score(best).mean)} % of their "
        f"accuracy, {percent(gain.mean)} ± {percent(gain.error)} points more than task arithmetic."
    )
    return sentence, "multi_task"


def experts_that_fit(results: Mapping[str, Any]) -> Answer:
    found = multi_task.sheets(results)
    best = {count: (sheet.best(), sheet.score(sheet.best())) for count, sheet in found.items()}
    said = ", ".join(f"{percent(score.mean)} % with {count}" for count, (_, score) in best.items())
    methods = (multi_task.SUM, "TIES", "TSV-M", "Iso-C", "Iso-CTS")
    series = {
        name: [(n, sheet.score(name).mean) for n, sheet in found.items() if name in sheet.merges] for name in methods
    }
    panel = Lines(
        {name: points for name, points in series.items() if points},
        Axis("experts in one model", whole=True),
        Axis("accuracy kept", percent=True),
    )
    figure = Figure("question_experts", "Accuracy kept by the number of experts merged", [panel])
    return f"Every additional expert costs accuracy. The best merge keeps {said} experts of one encoder.", figure


def bytes_needed(results: Mapping[str, Any]) -> Answer:
    rows = [row for row in results["rows"] if row["method"] != "experts as trained"]
    around = compression.error(results["experts"], results["sentences"])
    small = min((row for row in rows if row["normalised"] >= 1 - around), key=lambda row: row["ratio"])
    count = len(results["experts"])
    sentence = (
        f"Few. Of the tensors that training changed, {count} experts and their base take {small['ratio']:.2f} times "
        f"the space of the base alone, and the experts keep {percent(small['normalised'])} % of their accuracy "
        f"({small['method']} {small['setting']}, {small['dtype']}). Stored whole, they would take {count + 1} times."
    )
    return sentence, "compression"


def task_unknown(results: Mapping[str, Any]) -> Answer:
    name = "8" if "8" in results["sets"] else next(iter(results["sets"]))
    found = results["sets"][name]
    experts = answers.read({"0": found["experts"]}, found["sentences"])
    scores = {
        row: answers.difference(answers.read({"0": stored["label"]}, found["sentences"]), None, experts)
        for row, stored in found["rows"].items()
        if not stored.get("limit")
    }
    best = max(scores, key=lambda row: scores[row].mean)
    sentence = (
        f"An adaptive model finds out. On sentences of {len(found['tasks'])} tasks, without being told the task, the "
        f"best ({best}) keeps {percent(scores[best].mean)} ± {percent(scores[best].error)} % of the experts' accuracy. "
        f"A single merge with all heads keeps {percent(scores['TSV-M'].mean)} %."
    )
    return sentence, f"adaptive_{name}"


def alignment_works(results: Mapping[str, Any], resnets: Mapping[str, Any] | None = None) -> Answer:
    most, table = _largest(results)
    sentence = (
        f"Yes, for networks that match well. The plain mean of {most} MLPs trained from different seeds classifies "
        f"{percent(table['plain mean']['accuracy'])} % of the digits correctly, their mean after alignment "
        f"{percent(table['C²M³']['accuracy'])} %, and a single network {percent(mean(results['single']))} %."
    )
    if resnets is None:
        return sentence, "single_task_mlp"
    most, table = _largest(resnets)
    key = "repaired_accuracy"
    best = max(table, key=lambda way: table[way][key])
    sentence += (
        f" Narrow convolutional networks lose more. {most} ResNet20 on CIFAR-10, each at "
        f"{percent(mean(resnets['single']))} %, have a mean with {percent(table['plain mean'][key])} % after REPAIR, "
        f"with C²M³ {percent(table['C²M³'][key])} %, and with {best} {percent(table[best][key])} %."
    )
    return sentence, "single_task_mlp"


def _largest(results: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """The table of the most networks, and how many."""
    most = max(int(count) for count in results if count.isdigit())
    return most, results[str(most)]


def how_fast(results: Mapping[str, Any]) -> Answer | None:
    rows = {name: row for name, row in results["methods"].items() if "times_faster" in row}
    if not rows:
        return None
    fastest, slowest = (choose(rows, key=lambda name: rows[name]["times_faster"]) for choose in (max, min))
    taken = [row["ours"]["seconds"] for row in rows.values()]
    sentence = (
        f"Merging models of {results['params']} parameters takes {min(taken):.0f} to {max(taken):.0f} s on two cores, "
        f"{rows[slowest]['times_faster']:.1f} (`{slowest}`) to {rows[fastest]['times_faster']:.1f} (`{fastest}`) times "
        "faster than mergekit."
    )
    if ratios := [row["cpu_ratio_to_limit"] for row in results["methods"].values() if "cpu_ratio_to_limit" in row]:
        sentence += (
            f" Without start-up, the median method takes {median(ratios):.1f} times the processor time of {LIMIT}."
        )
    return sentence, "merge_speed"


def memory_needed(results: Mapping[str, Any]) -> Answer | None:
    rows = {name: row for name, row in results["methods"].items() if "mergekit" in row}
    if not rows:
        return None
    ours = max(row["ours"]["peak_anonymous"] for row in rows.values())
    peer = max(row["mergekit"]["peak_anonymous"] for row in rows.values())
    sides = {"merganser": "ours", "mergekit": "mergekit"}
    series = {label: [r[key]["peak_anonymous"] / 2**20 for r in rows.values()] for label, key in sides.items()}
    bars = Bars(list(rows), series, Axis(f"peak memory, MiB, models of {results['params']} parameters"))
    figure = Figure("question_memory", "Peak memory of merges by method, Merganser and mergekit", [bars])
    sentence = (
        f"At most {mebibytes(ours)} for {results['params']} parameters; mergekit takes up to {mebibytes(peer)}. "
        "Tensors are read, merged and written in blocks, so memory does not grow with the model."
    )
    return sentence, figure


def same_as_mergekit(results: Mapping[str, Any]) -> Answer:
    verdicts = {method: [case["verdict"] for case in cases.values()] for method, cases in results.items()}
    total = {kind: sum(each.count(kind) for each in verdicts.values()) for kind in ("same", "noted", "silent")}
    panel = Bars(
        list(verdicts),
        {kind: [float(each.count(kind)) for each in verdicts.values()] for kind in total},
        Axis("recipes", whole=True),
    )
    figure = Figure("question_parity", "Recipes that mean the same in mergekit and Merganser, by method", [panel])
    sentence = (
        f"Yes. Of {sum(total.values())} recipes, {total['same']} mean the same in both programs, {total['noted']} "
        f"differ with a note in the plan, and {total['silent']} differ without one."
    )
    return sentence, figure


def evaluations_needed(results: Mapping[str, Any]) -> Answer:
    best = evolution_racing.cheapest(results)
    rows = results["fitness"]
    sentence = (
        f"A race with {rows[best]['questions']:.0f} questions finds a winner as good as full evaluation with "
        f"{rows['full']['questions']:.0f} questions, in {rows['full']['seconds'] / rows[best]['seconds']:.0f} times "
        "less processor time (with simulated answers, so that the true scores are known)."
    )
    return sentence, evolution_racing.NAME


def cost_predicted(results: Mapping[str, Any]) -> Answer:
    rows = mergeability.pairs_of(results)
    mean, inputs = next(iter(rows[0]["methods"])), results["zoos"]["text"]["inputs"]
    rhos = {name: mergeability.correlation(rows, name, mean) for name in rows[0]["signals"]}
    weights = max((name for name in rhos if mergeability.of_weights(name)), key=lambda name: abs(rhos[name]))
    found = rhos[mergeability.ESTIMATE]
    elsewhere = "".join(
        f", and of {mergeability.correlation(pairs, mergeability.ESTIMATE, mean):.2f} with that of {len(pairs)} pairs "
        f"of {strangers}"
        for zoo, strangers in mergeability.STRANGERS.items()
        if (pairs := mergeability.pairs_of(results, zoo))
    )
    sentence = (
        f"{'Yes, from a few unlabelled inputs' if found >= mergeability.GOAL else 'Only to a degree'}: how often the "
        f"mean of two experts answers otherwise than they do, on {inputs} inputs of each task, has a rank correlation "
        f"of {found:.2f} with the accuracy that the {mean} of {len(rows)} pairs of text experts loses{elsewhere}. The "
        f"best signal of the weights alone, {weights.replace('_', ' ')}, has {rhos[weights]:.2f}."
    )
    return sentence, "mergeability"


QUESTIONS = (
    Question("Which method keeps most?", "multi_task", keeps_most, "merganser methods iso_cts"),
    Question("How many experts fit into one model?", "multi_task", experts_that_fit, "merganser merge recipe.yml OUT"),
    Question(
        "How many bytes does an expert need?",
        "compression",
        bytes_needed,
        "merganser library build LIBRARY math=./math code=./code --base ./base --budget 200MB",
    ),
    Question(
        "What if the task is not known?",
        "adaptive",
        task_unknown,
        "merganser serve LIBRARY --model net:build --heads HEADS",
    ),
    Question(
        "Does alignment work?",
        "single_task_mlp",
        alignment_works,
        "merganser align A.safetensors B.safetensors OUT --model net:build --shape 1x784",
        beside="single_task_resnet20-bn",
    ),
    Question("How fast is it?", "merge_speed", how_fast, "merganser merge recipe.yml OUT"),
    Question("How much memory does it take?", "merge_speed", memory_needed, "merganser plan recipe.yml"),
    Question(
        "Do my mergekit recipes give the same model?",
        "parity_dialect",
        same_as_mergekit,
        "merganser plan mergekit.yml --native",
    ),
    Question(
        "How many evaluations does a search need?",
        "evolve_racing",
        evaluations_needed,
        "merganser evolve run run.yml",
    ),
    Question(
        "Can I tell beforehand whether models merge well?",
        "mergeability",
        cost_predicted,
        "merganser auto ./base ./math ./code out/ --data multiple-choice:quiz.jsonl",
    ),
)
