"""Networks that differ: zipped classes, widths and depths; other tokenizers; dense models as experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Part, Table, Text


def zipped(results: Mapping[str, Any]) -> Iterator[Part]:
    """Accuracies of networks made of two that differ in classes, width or depth."""
    if rows := results.get("halves"):
        yield Text(
            "Two small CNNs, each trained on five classes of Fashion-MNIST, as one network with two heads. *Joint* "
            "accuracy is over all ten classes, the log-probabilities of both heads side by side; *own* accuracy is "
            "that of each head on its five classes. Zipping groups units of both networks by the correlation of their "
            "activations; permutations pair them one to one by the same. BatchNorm is reset in all of them. The heads "
            "of the ensemble were never compared in training, so its joint accuracy is no upper bound. How units are "
            "grouped (complete linkage) was chosen among four ways on 800 of these test images. Every row of this "
            "section is one pair of networks, so that it has no spread over seeds."
        )
        yield _joined(rows)
    if rows := results.get("cifar10_halves"):
        yield Text(
            "The same on CIFAR-10, for one pair of networks; the median cosine of their layers with their start is "
            f"{' and '.join(f'{cosine:.2f}' for cosine in rows[0]['cosines'])}. Nothing was chosen on these "
            f"images: units are grouped as above. {_lead_of_zip(rows)} Errors are standard errors over the test images."
        )
        yield _joined(rows)
    if rows := results.get("widths"):
        yield Text(
            "MLPs with three hidden layers of 256 and of 512 units for all ten classes, zipped into either shape "
            "without any training. The wide network zipped by itself shows what the narrow shape costs."
        )
        yield _accuracies(rows)
    if rows := results.get("depths"):
        plan = next((row["plan"] for row in rows if "plan" in row), [])
        shown = ", ".join("–" if source is None else str(source) for source in plan)
        yield Text(
            "Patch transformers of four and of six blocks. The shallow one is stretched first, which keeps its "
            f"function (blocks placed at: {shown}), then matched by activations and averaged."
        )
        yield _accuracies(rows)
        averages = [row["accuracy"] for row in rows if row["method"].startswith("average")]
        if averages and max(averages) < min(row["accuracy"] for row in rows[:2]):
            yield Text("No average reaches either network: without training, this is a start and not a result.")


def _joined(rows: list[Mapping[str, Any]]) -> Table:
    cells = [
        [
            row["method"],
            row["separate"],
            percent(row["joint"]) + (f" ± {percent(row['error'])}" if "error" in row else ""),
            percent(row["own"]),
            f"{row['weights']:,}",
        ]
        for row in rows
    ]
    return Table(["network", "separate", "joint", "own", "weights"], cells, "Accuracy in percent")


def _lead_of_zip(rows: list[Mapping[str, Any]]) -> str:
    """Say where zip is ahead of permutations by more than two standard errors, and how it compares to the ensemble."""
    zips = [row for row in rows if row["method"] == "zip"]
    ahead = sum(row["ahead"] > 2 * row["ahead_error"] for row in zips)
    below = sum(row["joint"] < rows[0]["joint"] for row in zips)
    leads = ", ".join(f"{percent(row['ahead'])} ± {percent(row['ahead_error'])}" for row in zips)
    return (
        f"On the same images, zip is {leads} points ahead of permutations in the order of the table, more than two "
        f"standard errors in {ahead} of {len(zips)} cases. It is below the ensemble, which has all weights of both, in "
        f"{below}."
    )


def _accuracies(rows: list[Mapping[str, Any]]) -> Table:
    return Table(
        ["network", "accuracy"], [[row["method"], percent(row["accuracy"])] for row in rows], "Accuracy in percent"
    )


def transplant(results: Mapping[str, Any]) -> Iterator[Part]:
    """Perplexity after a change of tokenizer, by rule."""
    rows = results["rows"]
    found = {row["rule"].partition(":")[0]: row for row in rows}
    yield Text(
        f"{results['model']} with the tokenizer of {results['donor']}, without any training, on {results['texts']} "
        "texts (word problems and film reviews). Perplexity is per token of the tokenizer in use; bits per "
        "byte compare all rows. Seconds are processor seconds of the whole command with one thread."
    )
    cells = [
        [
            row["rule"],
            f"{row['perplexity']:.2f}",
            f"{row['bits_per_byte']:.4f}",
            "–" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.0f}",
        ]
        for row in rows
    ]
    yield Table(["rows of new tokens", "perplexity", "bits per byte", "seconds"], cells)
    peer = next((row for row in rows if row["rule"].startswith("tokensurgeon")), None)
    if peer and "omp" in found:
        better = found["omp"]["perplexity"] <= peer["perplexity"] and found["omp"]["cpu_seconds"] < peer["cpu_seconds"]
        yield Text(
            f"Goal: `omp` with a perplexity not above tokensurgeon's, and faster: {'' if better else 'not '}met."
        )


def mixtures(results: Mapping[str, Any]) -> Iterator[Part]:
    """Perplexity of mixtures by gate."""
    rows = results["rows"]
    kinds = [key for key in rows[0] if key not in ("model", "experts_per_token", "mean")]
    yield Text(
        f"Three experts, fine-tuned from {results['base']} on word problems, film reviews and requests to an "
        "assistant, as dense merges and as mixtures that were not trained. A mixture keeps the base's attention and "
        "embedding, which the experts have changed too, so that less is left of each expert."
    )
    cells = [[row["model"], *(f"{row[kind]:.1f}" for kind in (*kinds, "mean"))] for row in rows]
    yield Table(["model", *kinds, "mean"], cells, "Perplexity on test texts; the mean is geometric")
    dense, mixed = (
        min((row for row in rows if row["model"].startswith(start)), key=lambda row: float(row["mean"]))
        for start in ("merged", "mixture")
    )
    alone = min(row["mean"] for row in rows if row["model"].startswith("expert"))
    free = min(row["mean"] for row in rows if "singular" in row["model"])
    drawn = min(row["mean"] for row in rows if "random" in row["model"])
    right = next((row["mean"] for row in rows if row["model"].startswith("the right")), None)
    yield Text(
        f"Best mean of a mixture: {mixed['mean']:.0f} ({mixed['model'].removeprefix('mixture, ')}); of a dense merge: "
        f"{dense['mean']:.0f} ({dense['model'].removeprefix('merged, ')}); of an expert alone: {alone:.0f}. Gates from "
        f"the weights alone (`singular`) reach {free:.0f}, random ones {drawn:.0f}. "
        + (f"The MLPs of the right expert for every text would give {right:.0f}. " if right else "")
        + (
            "A mixture is ahead of the dense merges here."
            if mixed["mean"] < dense["mean"]
            else "Without training, no mixture beats the best dense merge here: gates can choose an expert's MLPs, but "
            "the attention stays the base's."
        )
    )


NETWORKS = {"mlp": "MLPs", "cnn": "small CNNs", "vit": "patch transformers", "text": "MiniLM text experts"}


def transport(results: Mapping[str, Any]) -> Iterator[Part]:
    """Accuracy of fine-tunes that were moved to another base."""
    rows = results["rows"]
    networks = {row["network"] for row in rows}
    images = (
        "Images: classifiers of Fashion-MNIST (the old task) were fine-tuned on the garments turned by a quarter (the "
        "new task); the other base has another seed, or is the same one trained on. "
    )
    sentences = (
        "Text: MiniLM experts for mr, subj and trec are moved to the encoder that was trained for clinc150 (the old "
        "task), as it is and with its units shuffled, scored on 200 sentences each. "
    )
    yield Text(
        "What a fine-tune of one base has learned, moved to another base. "
        + (images if networks - {"text"} else "")
        + (sentences if "text" in networks else "")
        + "The scale is chosen by validation data of the new task, among 0.25, 0.5, 0.75, 1 and 1.5. *Mask*: only "
        "entries that agree in sign with a descent step on four labelled batches. Standard errors are over pairs of "
        "bases or over tasks."
    )
    for network, release in dict.fromkeys((row["network"], row["release"]) for row in rows):
        own = [
            row for row in rows if (row["network"], row["release"]) == (network, release) and row["chosen"] is not False
        ]
        plain = {
            (row["way"], row["mask"]): row for row in rows if row["chosen"] is False and _of(row, network, release)
        }
        cells = []
        for row in own:
            at_one = plain.get((row["way"], row["mask"]))
            name = row["way"] + (", mask" if row["mask"] else "")
            scale = f"{row['scale']:.2f}" if "scale" in row else "–"
            cells.append(
                [
                    name,
                    _with_error(at_one, "new") if at_one else "–",
                    scale,
                    _with_error(row, "new"),
                    _with_error(row, "old"),
                ]
            )
        columns, count = ["", "new task, scale 1", "scale", "new task", "old task"], own[0]["cases"]
        yield Table(
            columns,
            cells,
            f"{NETWORKS[network]}, {release} ({count} case{'s' * (count > 1)}), accuracy in percent",
        )
    yield Text(_moved(rows))


def _of(row: Mapping[str, Any], network: str, release: str) -> bool:
    return bool(row["network"] == network and row["release"] == release)


def _with_error(row: Mapping[str, Any], key: str) -> str:
    error = row.get(f"{key}_error")
    return percent(row[key]) + ("" if error is None else f" ± {percent(error)}")


def _moved(rows: list[Mapping[str, Any]]) -> str:
    """What the best way has moved in each setting, and what the mask gives beside training on as few data."""
    said = []
    for network, release in dict.fromkeys((row["network"], row["release"]) for row in rows):
        own = [row for row in rows if _of(row, network, release)]
        base, few, native = (
            next(row["new"] for row in own if row["way"] == way)
            for way in ("the new base as it is", "trained on the four batches", "fine-tuned anew")
        )
        chosen = [row for row in own if row["chosen"]]
        best = max((row for row in chosen if not row["mask"]), key=lambda row: float(row["new"]))
        masked = max((row["new"] for row in chosen if row["mask"]), default=base)
        gain = (best["new"] - base) / (native - base) if native > base else 0.0
        ahead = "more" if masked > few else "less"
        said.append(
            f"{NETWORKS[network]}, {release}: {best['way']} moved {100 * gain:.0f} % of what fine-tuning anew gains; "
            f"with the mask the best is {percent(masked)} %, {ahead} than training on the four batches alone "
            f"({percent(few)} %)"
        )
    return " ".join(f"{each[0].upper()}{each[1:]}." for each in said)
