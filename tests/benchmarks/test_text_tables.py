"""The tables about text experts on a toy encoder: scores, choices of α, compression, correlations, slopes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import merganser as mg
from benchmarks import answers, compression, held_out, mergeability, multi_task, text_experts, text_statistics, theory
from benchmarks.probes import Probes
from benchmarks.records import stored
from benchmarks.text_experts import TextExperts
from benchmarks.zoo import text_tasks
from benchmarks.zoo.text_tasks import Sentences, Task
from merganser.library.codes.signs import Signs
from merganser.tuning.expected_losses import SLOPE, SPREAD

TASKS = ("one", "two", "three")


class ToyEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embeddings = nn.Embedding(20, 12)
        self.layer = nn.Linear(12, 12)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=torch.tanh(self.layer(self.embeddings(input_ids))))


def sentences(count: int, seed: int) -> Sentences:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, count)
    return Sentences(
        rng.integers(1, 20, int(lengths.sum())), np.cumsum(lengths), torch.from_numpy(rng.integers(0, 3, count))
    )


def moved(base: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in base.items()
        if name.startswith("layer")
    }


def layers_from(weights: Mapping[str, Tensor]) -> ToyEncoder:
    encoder = ToyEncoder()
    encoder.load_state_dict(dict(weights))
    return encoder


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> TextExperts:
    monkeypatch.setattr(text_experts, "layers_from", layers_from)
    base = ToyEncoder().state_dict()
    generator = torch.Generator().manual_seed(9)
    return TextExperts(
        base,
        {name: moved(base, seed) for seed, name in enumerate(TASKS)},
        {n: Task(n, 3, sentences(1, s), sentences(30, s), sentences(50, s + 9)) for s, n in enumerate(TASKS)},
        {n: {"weight": torch.randn(3, 12, generator=generator), "bias": torch.zeros(3)} for n in TASKS},
    )


def reference(experts: TextExperts) -> dict[str, float]:
    return experts.own_scores(experts.experts)


def test_changed_names_what_some_expert_moved() -> None:
    base = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)}
    first, second = ({**base, "a": torch.ones(2)}, {**base, "c": torch.ones(1)})
    assert text_experts.changed(base, [first, second]) == ["a", "c"]


def test_task_vector_is_that_of_the_public_merge(experts: TextExperts) -> None:
    found = experts.task_vector("task_arithmetic", TASKS[:2])
    for name, value in found.items():
        expected = sum(experts.experts[task][name] - experts.base[name] for task in TASKS[:2])
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)
    weights = experts.weights(found, 0.5)
    assert torch.equal(weights["embeddings.weight"], experts.base["embeddings.weight"])


def test_scores_are_those_of_the_task_with_its_head(experts: TextExperts) -> None:
    state = experts.whole(experts.experts["one"])
    part = experts.tasks["one"].test
    logits = text_tasks.encode(layers_from(state), part) @ experts.heads["one"]["weight"].T
    expected = logits.argmax(1) == part.labels
    assert torch.equal(experts.answers(state, ["one"])["one"], expected)
    assert reference(experts)["one"] == pytest.approx(float(expected.float().mean()))


def fresh(method: multi_task.Method) -> dict[str, Any]:
    return {"tasks": 3, "method": method.name, "alpha": None, "answers": {}}


def test_row_has_the_answers_of_the_alpha_its_sweep_prefers(experts: TextExperts) -> None:
    bench = multi_task.Bench(TASKS, {0: experts, 1: experts})
    method = multi_task.Method("TIES", "ties", (0.5, 1.0), {"density": 0.5})
    row = bench.measure(method, fresh(method))
    assert set(row["sweep"]) >= {"0.5", "1.0"}
    assert row["sweep"][str(row["alpha"])] == max(row["sweep"].values())
    vector = experts.task_vector("ties", TASKS, density=0.5)
    expected = experts.answers(experts.weights(vector, row["alpha"]), TASKS)
    found = answers.read(row["answers"], dict.fromkeys(TASKS, 50))
    for seed in ("0", "1"):
        assert all((found[seed][task] == expected[task].numpy()).all() for task in TASKS)


def test_statistics_are_of_the_inputs_of_each_expert(experts: TextExperts) -> None:
    found = text_statistics.grams(experts, TASKS[:2])["gram"]["one"]
    part = experts.tasks["one"].validation
    rows = experts.base["embeddings.weight"][torch.from_numpy(part.tokens[: part.ends[29]])].double()
    expected = rows.T @ rows / len(rows)
    torch.testing.assert_close(found.tensors["layer.weight"].double(), expected, rtol=1e-4, atol=1e-5)
    merged = text_statistics.merged_grams(experts, TASKS[:2])["gram"]["one"]
    torch.testing.assert_close(merged.tensors["layer.weight"].double(), expected, rtol=1e-4, atol=1e-5)


def test_methods_with_statistics_get_them(experts: TextExperts) -> None:
    bench = multi_task.Bench(TASKS, {0: experts})
    method = multi_task.Method("RegMean", "regmean", (1.0,), {"alpha": 0.95}, (3,), text_statistics.grams)
    row = bench.measure(method, fresh(method))
    vector = experts.task_vector("regmean", TASKS, alpha=0.95, statistics=text_statistics.grams(experts, TASKS))
    expected = experts.answers(experts.weights(vector), TASKS)
    found = answers.read(row["answers"], dict.fromkeys(TASKS, 50))["0"]
    assert all((found[task] == expected[task].numpy()).all() for task in TASKS)


def test_a_row_is_completed_not_measured_again(experts: TextExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    method = multi_task.Method("task arithmetic", "task_arithmetic", (0.3,))
    before = {"0": dict.fromkeys(TASKS, "00" * 7)}
    row = {**fresh(method), "alpha": 0.7, "sweep": {}, "answers": dict(before)}
    found = multi_task.Bench(TASKS, {0: experts, 1: experts}).measure(method, row)
    assert found["alpha"] == 0.7
    assert found["answers"]["0"] == before["0"]
    assert set(found["answers"]) == {"0", "1"}


def test_a_grid_grows_where_its_end_is_the_best(experts: TextExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = multi_task.Bench(TASKS, {0: experts})
    monkeypatch.setattr(multi_task.Bench, "validated", lambda self, vector, alpha: -abs(alpha - 1.5))
    assert list(bench.sweep({}, (0.5, 1.0))) == [0.5, 1.0, 1.4, 2.0]
    monkeypatch.setattr(multi_task.Bench, "validated", lambda self, vector, alpha: alpha)
    assert len(bench.sweep({}, (0.5, 1.0))) == 2 + multi_task.GROWN
    monkeypatch.setattr(multi_task.Bench, "validated", lambda self, vector, alpha: -alpha)
    assert min(bench.sweep({}, (0.5, 1.0))) < 0.5


@given(st.dictionaries(st.sampled_from([0.1, 0.2, 0.5, 1.0, 2.0]), st.floats(0, 1), min_size=1))
def test_best_alpha_is_the_smallest_of_the_best(sweep: dict[float, float]) -> None:
    chosen = multi_task.best(sweep)
    assert all(score < sweep[chosen] or (score == sweep[chosen] and alpha >= chosen) for alpha, score in sweep.items())


def test_references_are_the_base_and_the_experts(experts: TextExperts) -> None:
    base, own = multi_task.Bench(TASKS, {0: experts}).references()
    for row, expected in ((base, experts.answers(experts.base, TASKS)), (own, experts.own_answers(experts.experts))):
        found = answers.read(row["answers"], dict.fromkeys(TASKS, 50))["0"]
        assert all((found[task] == expected[task].numpy()).all() for task in TASKS)


def test_stored_rows_stay_only_with_the_same_experts(experts: TextExperts) -> None:
    references = list(multi_task.Bench(TASKS, {0: experts}).references())
    row = {"tasks": 3, "method": "TIES", "alpha": 1.0, "sweep": {}, "answers": {}}
    shared = {**row, "method": "TSV-M", "share": 0.5}
    stored = {"rows": [*references, row, {**row, "tasks": 8}], "ranks": [shared]}
    assert multi_task.kept_rows(stored, references)[("TIES",)] is row
    assert multi_task.kept_rows(stored, references)[("TSV-M", "0.5")] is shared
    other = json.loads(json.dumps(references))
    other[1]["answers"]["0"]["one"] = "ff" * 7
    assert multi_task.kept_rows(stored, other) == {}


def test_interference_is_summed_truncated_full_and_after(experts: TextExperts) -> None:
    from benchmarks.text_interference import layers, totals

    found = totals(experts.trained, experts.experts, layers(experts.trained, experts.experts))
    deltas = [experts.experts[task]["layer.weight"] - experts.base["layer.weight"] for task in TASKS]
    expected = {}
    for name, rank in (("truncated", 4), ("full", 12)):
        parts = [np.linalg.svd(delta.double().numpy(), full_matrices=False) for delta in deltas]
        left = np.concatenate([u[:, :rank] for u, _, _ in parts], 1)
        right = np.concatenate([v[:rank].T for _, _, v in parts], 1)
        values = np.concatenate([s[:rank] for _, s, _ in parts])
        eye = np.eye(len(values))
        expected[name] = np.abs((left.T @ left - eye) @ np.diag(values) @ (right.T @ right - eye)).sum()
    assert found["truncated"] == pytest.approx(expected["truncated"], rel=1e-4)
    assert found["full"] == pytest.approx(expected["full"], rel=1e-4)
    assert found["after"] < 1e-6 * found["truncated"]


@given(st.integers(0, 50), st.sampled_from([(7,), (3, 5), (1, 1)]))
def test_rounded_int8_is_within_half_a_step(seed: int, shape: tuple[int, ...]) -> None:
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    back, nbytes = compression.rounded(delta, torch.int8)
    rows = delta.reshape(shape[0] if len(shape) > 1 else 1, -1)
    steps = rows.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((back.reshape(rows.shape) - rows).abs() <= steps * 0.5001).all())
    assert nbytes == delta.numel() + 4 * len(rows)


def test_rounded_bfloat16_takes_half() -> None:
    delta = torch.randn(4, 6)
    back, nbytes = compression.rounded(delta, torch.bfloat16)
    assert nbytes == delta.nbytes // 2
    torch.testing.assert_close(back, delta.bfloat16().float())


@pytest.mark.parametrize(
    "line",
    [
        compression.low_precision(torch.int8),
        compression.tall(0.4),
        compression.tall_ties(0.4),
        compression.emr(torch.bfloat16),
        compression.by_rank(1 / 2, "bfloat16"),
        compression.by_budget(6.0, "float32", "plenty"),
        compression.codes_each(0.3, "each"),
        compression.codes_together(0.9, "together"),
        compression.one_code("signs", Signs("rows"), "", "1 bit"),
    ],
    ids=lambda line: line.method + line.setting,
)
def test_compressed_experts_are_counted_and_scored(experts: TextExperts, line: compression.Line) -> None:
    row = compression.measure(line, experts, reference(experts))
    assert row["bytes"] > 0
    assert row["ratio"] == pytest.approx(1 + 3 * row["per_expert"])
    assert row["largest"] <= (0.3 if line.setting == "each" else row["ratio_to_base"] - 1)
    if line.setting == "together":
        assert row["ratio_to_base"] <= 1.9
    assert set(row["per_task"]) == set(TASKS)
    if line.setting == "plenty":
        assert row["normalised"] == pytest.approx(1)
        assert row["per_expert"] <= 6


def test_signals_of_a_pair_are_what_a_plain_computation_gives(experts: TextExperts) -> None:
    probes = Probes.of(experts, 10)
    found = probes.signals(("one", "two"))
    middle = experts.whole({k: (experts.experts["one"][k] + experts.experts["two"][k]) / 2 for k in experts.trained})
    shares, divergences, pulls = [], [], []
    for own, other in (("one", "two"), ("two", "one")):
        states = (experts.whole(experts.experts[own]), middle)
        part, head = experts.tasks[own].validation.slice(0, 10), experts.heads[own]["weight"].T
        expert, mean = (text_tasks.encode(layers_from(state), part) @ head for state in states)
        shares.append(float((expert.argmax(1) != mean.argmax(1)).float().mean()))
        p, q = expert.softmax(1), mean.softmax(1)
        divergences.append(float((p * (p / q).log()).sum(1).mean()))

        def loss(t: float, expert: Tensor = expert, own: str = own, other: str = other) -> Tensor:
            moved = {k: v + t * (experts.experts[other][k] - v) for k, v in experts.trained.items()}
            logits = experts.logits(layers_from({**experts.base, **moved}), own, range(10), "validation")
            return nn.functional.cross_entropy(logits, expert.argmax(1))

        with torch.no_grad():
            pulls.append(float(loss(1e-2) - loss(-1e-2)) / 2e-2)
    assert found["disagreement"] == pytest.approx(np.mean(shares))
    assert found["divergence"] == pytest.approx(np.mean(divergences), rel=1e-4)
    assert found["pull"] == pytest.approx(np.mean(pulls), abs=1e-3)
    assert probes.disagreement(middle, ("one", "two")) == pytest.approx(np.mean(shares))


def test_losses_of_pairs_are_of_the_experts_accuracy(experts: TextExperts) -> None:
    probes = Probes.of(experts, 10)
    rows = mergeability.unmerged(experts, probes, experts)
    assert [tuple(row["experts"]) for row in rows] == list(itertools.combinations(TASKS, 2))
    assert rows[0]["signals"]["bend"] == pytest.approx(0, abs=1e-6)
    found = mergeability.measure(experts, probes, "mean", TASKS[:2])
    middle = experts.whole({k: (experts.experts["one"][k] + experts.experts["two"][k]) / 2 for k in experts.trained})
    scores, own = experts.scores(middle, TASKS[:2]), reference(experts)
    assert found["accuracies"] == list(scores.values())
    assert found["loss"] == pytest.approx(1 - np.mean([scores[name] / own[name] for name in TASKS[:2]]))


def test_losses_are_estimated_with_the_line_through_all_stored_pairs() -> None:
    pairs = stored("mergeability")["results"]["pairs"]
    merges = [own for row in pairs for own in row["methods"].values()]
    x, y = np.array([(own["disagreement"], own["loss"]) for own in merges]).T
    slope = (x @ y) / (x @ x)
    assert round(slope, 2) == SLOPE
    assert round(math.sqrt(((y - slope * x) ** 2).sum() / (len(x) - 1)), 3) == SPREAD


def test_held_out_losses_come_from_other_experts_and_other_methods() -> None:
    def row(a: str, b: str, disagreement: float, loss: float) -> dict[str, Any]:
        seen = {"loss": loss, "disagreement": disagreement}
        return {"experts": [a, b], "methods": {"seen": seen, "unseen": {"loss": 99.0, "disagreement": disagreement}}}

    rows = [row("a", "b", 2.0, 77.0), row("a", "c", 0.5, 77.0), row("c", "d", 1.0, 3.0), row("d", "e", 3.0, 9.0)]
    assert held_out.predictions(rows, rows, "unseen", ["seen"])[0] == pytest.approx(3 * 2.0)
    assert held_out.predictions(rows[2:], rows[:1], "unseen", ["seen"]) == pytest.approx([6.0])
    assert held_out.fit(rows[2:], ["seen"]) == pytest.approx((3.0, 0.0))


def test_trajectories_of_straight_runs_are_linear(experts: TextExperts) -> None:
    early = TextExperts(
        experts.base,
        {n: {k: (v + experts.base[k]) / 2 for k, v in e.items()} for n, e in experts.experts.items()},
        experts.tasks,
        experts.heads,
    )
    run, verdict = theory.trajectories(early, experts)
    assert verdict == "linear"
    assert all(row["cosine"] == pytest.approx(1) and row["first_share"] == pytest.approx(0.5) for row in run)


def test_theory_holds_on_digits() -> None:
    pytest.importorskip("sklearn")
    losses = theory.digits_losses(images=40)
    assert all(row["relative"] < 1e-12 for row in theory.one_epoch(losses, (0.25, 1.0)))
    (row,) = theory.orders(losses, (0.25,), (2,))
    assert row["gap_slope"] == pytest.approx(2, abs=0.1)
    assert row["corrected_slope"] == pytest.approx(3, abs=0.1)
    assert row["printed_slope"] == pytest.approx(2, abs=0.1)


def test_printed_bounds_are_below_what_they_bound_and_corrected_ones_are_not() -> None:
    for row in theory.bounds():
        assert row["printed_c"] < row["c"] < row["corrected_c"]
        assert row["hessian"] <= row["corrected_hessian"]
        assert row["gradient"] <= row["corrected_gradient"]


def test_rows_are_kept_for_the_same_experts_only(tmp_path: Path) -> None:
    row = {"method": "EMR", "setting": "", "dtype": "float32"}
    path = tmp_path / "compression.json"
    assert compression.kept_rows(path, {"one": 0.5}) == {}
    path.write_text(json.dumps({"results": {"experts": {"one": 0.5}, "rows": [row]}}))
    assert compression.kept_rows(path, {"one": 0.5}) == {("EMR", "", "float32"): row}
    assert compression.kept_rows(path, {"one": 0.75}) == {}


def test_early_experts_are_normalised_by_the_late_ones(experts: TextExperts, tmp_path: Path) -> None:
    rows, sweep = theory.early_and_late(experts, experts, own := reference(experts))
    assert [row["experts"] for row in rows] == ["first epoch", "last epoch"]
    assert rows[0]["own_normalised"] == pytest.approx(1)
    assert rows[0]["own"] == pytest.approx(math.fsum(own.values()) / 3)
    assert {point["alpha"] for point in sweep} >= set(multi_task.SUMS)


def test_layers_are_those_of_the_survey(experts: TextExperts) -> None:
    from benchmarks.text_interference import layers

    (row,) = layers(experts.trained, experts.experts)
    (matrix,) = mg.interference.survey(dict(experts.trained), dict(experts.experts)).matrices
    assert (row["layer"], row["sti"], row["rank"]) == ("layer.weight", matrix.sti, matrix.rank)
