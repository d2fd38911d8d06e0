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
            "grouped (complete linkage) was chosen among four ways on 800 of these test images."
        )
        cells = [
            [row["method"], row["separate"], percent(row["joint"]), percent(row["own"]), f"{row['weights']:,}"]
            for row in rows
        ]
        yield Table(["network", "separate", "joint", "own", "weights"], cells, "Accuracy in percent")
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
