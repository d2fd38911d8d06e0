"""The smaller tables of single-task merging, on networks and images small enough for a test."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.extras import ensembles, federated, landscapes, matchings, transports
from benchmarks.single_task_extras import TABLES, lines
from benchmarks.zoo.architectures import MLP
from benchmarks.zoo.images import Split
from merganser import align
from merganser.align.permutations import inverse, random


@pytest.fixture(scope="module")
def models():
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        made.append(MLP(16, 4, (8, 8)).eval())
    return made


@pytest.fixture(scope="module")
def symmetry(models):
    return align.symmetry(models[0], torch.randn(2, 16))


@pytest.fixture(scope="module")
def split():
    torch.manual_seed(0)
    images = torch.randint(0, 256, (300, 4, 4, 1), dtype=torch.uint8)
    return Split(images, torch.randint(0, 4, (300,)), torch.tensor([0.5]), torch.tensor([0.3]))


def test_barriers_between_copies_vanish_in_the_universe(models, symmetry, split):
    copy = align.scramble(models[0], symmetry, seed=3)
    found = landscapes.barriers([models[0], copy], symmetry, split, points=3)
    assert set(found) == {"as trained", "weight matching", "C²M³"}
    assert found["C²M³"]["barrier"] == pytest.approx(0.0, abs=1e-5)
    assert len(found["as trained"]["losses"]) == 3


def test_batch_norm_statistics_are_recomputed_on_the_way(split):
    networks = []
    for seed in range(2):
        torch.manual_seed(seed)
        networks.append(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
        networks[-1].eval()
    fresh = [images for images, _ in split.batches(100)]
    known = align.symmetry(networks[0], fresh[0][:2])
    found = landscapes.barriers(networks, known, split, fresh, points=3)
    assert len(found) == 6
    assert found["as trained"]["losses"] != found["as trained, statistics recomputed"]["losses"]


def test_likeness_of_copies(models, symmetry, split):
    copies = [models[0], align.scramble(models[0], symmetry, seed=1)]
    rows = landscapes.likeness(align.universe(copies, symmetry), models[0], "layers.1", split)
    assert rows["after"]["weight_cosine"] == pytest.approx(1.0)
    assert rows["after"]["output_distance"] == pytest.approx(0.0, abs=1e-4)
    assert rows["before"]["output_cka"] == pytest.approx(1.0)
    assert rows["before"]["weight_cosine"] < 0.99


def test_seeds_spread_and_two_runs_do_not(models, symmetry):
    rows = matchings.seeds_against_none(models, symmetry, lambda state: float(state["head.bias"].sum()), seeds=4)
    assert rows["Git Re-Basin"]["runs"] == 4
    assert rows["C²M³"]["objective_std"] == 0.0
    assert rows["C²M³"]["same_permutations"] == 1.0


def test_a_walk_through_maps_that_factor_comes_home(models, symmetry):
    state = {name: tensor.detach() for name, tensor in models[0].state_dict().items()}
    there = random(symmetry, 0)
    back = inverse(symmetry, there)
    assert matchings.walk(state, symmetry, lambda target, _: there if target else back, (0, 1, 0)) == (0.0, 1.0)
    distance, home = matchings.walk(state, symmetry, lambda target, source: there, (0, 1, 0))
    assert distance > 0.1
    assert home < 1.0


def test_cycles_of_the_universe_close(models, symmetry):
    rows = matchings.cycles(models, symmetry)
    assert rows["C²M³"] == {"distance": 0.0, "largest_distance": 0.0, "units_back": 1.0}
    assert all(0.0 <= row["units_back"] <= 1.0 for row in rows.values())


def test_subsets(models, symmetry):
    rows = matchings.subsets(align.universe(models, symmetry), lambda state: 0.5, (2,))
    assert rows["2 of 3"]["subsets"] == 3
    assert rows["2 of 3"]["joint_accuracy"] == 0.5


def test_ensembles(models, symmetry, split):
    batches = [images for images, _ in split.batches(100)]
    rows = ensembles.table(align.universe(models, symmetry), models[0], batches, split, samples=2)
    assert rows["ensemble of the models"]["networks"] == 3
    assert all(0.0 <= row["accuracy"] <= 1.0 for row in rows.values())
    assert sum("REPAIR" in name for name in rows) == 4
    copies = [models[0], align.scramble(models[0], symmetry, seed=1)]
    rows = ensembles.table(align.universe(copies, symmetry), models[0], batches, split, samples=2)
    alike = {row["accuracy"] for name, row in rows.items() if "without matching" not in name}
    assert len(alike) == 1  # every combination of aligned copies is the network itself


def test_references_and_orders(models, symmetry):
    found = align.universe(models, symmetry)
    rows = matchings.references(found, lambda state: 0.5)
    assert list(rows) == ["model 0", "model 1", "model 2", "C²M³"]
    assert rows["C²M³"] == {"objective": found.objective, "accuracy": 0.5}
    rows = matchings.orders(models, symmetry, lambda state: float(state["head.bias"].sum()))
    assert list(rows) == ["best first", "best last", "as they come"]
    assert len({row["accuracy"] for row in rows.values()}) == 1  # the biases of the head are not permuted


def test_federated_rounds():
    torch.manual_seed(0)
    images = torch.randint(0, 256, (200, 32, 32, 3), dtype=torch.uint8)
    split = Split(images, torch.randint(0, 10, (200,)), torch.tensor([0.5] * 3), torch.tensor([0.3] * 3))
    drawn = federated.Federation.drawn(split, split, 0)
    assert sorted(torch.cat(drawn.shares).tolist()) == list(range(200))
    rows = federated.table(split, split, 2, epochs=(1,), rounds=2)
    assert set(rows) == {f"{s}: 1: {w}" for s in federated.STARTS for w in ("clients alone", *federated.WAYS)}
    assert [len(scores) for scores in rows["same: 1: FedAvg"]] == [2, 2]
    assert [len(scores) for scores in rows["same: 1: clients alone"]] == [1, 1]


def test_clients_of_equal_models_are_trained_once(monkeypatch):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (60, 32, 32, 3), dtype=torch.uint8)
    split = Split(images, torch.randint(0, 10, (60,)), torch.tensor([0.5] * 3), torch.tensor([0.3] * 3))
    drawn = federated.Federation.drawn(split, split, 0)
    train, calls = federated.Federation.clients, []
    monkeypatch.setattr(federated.Federation, "clients", lambda *given: calls.append(given) or train(*given))
    own = [federated.state_of(federated.network(client)) for client in range(federated.CLIENTS)]
    together = drawn.rounds(own[:1] * federated.CLIENTS, 1, 0, 2)
    assert together["FedAvg"] == together["aligned in a universe"] == together["aligned to the global model"]
    assert len(calls) == 1
    apart = drawn.rounds(own, 1, 0, 2)
    assert len(calls) == 4
    plain = federated.average(own, [len(share) for share in drawn.shares])
    assert apart["FedAvg"][0] == drawn.accuracy(plain)


def test_transport_to_a_scrambled_base_is_exact(models, symmetry, split):
    target = align.scramble(models[0], symmetry, seed=5)
    rows = transports.table(models[0], target, symmetry, {"turned": (transports.rotated(split), split)}, split)
    assert rows["turned: weight matching, scale 1"] == rows["turned: source fine-tuned"]
    assert torch.equal(transports.rotated(split).images[0, :, :, 0], split.images[0, :, :, 0].rot90())


def test_lines_go_to_the_numbers():
    assert [" ".join(each.split()) for each in lines({"a": {"x": 1.0, "y": [1]}, "b": {"c": {"z": 2}}}, "t")] == [
        "t: a x 1",
        "t: b: c z 2",
    ]
    assert len(TABLES) == 12


def test_every_start_reaches_a_universe(models, symmetry):
    found = matchings.starts(models, symmetry, lambda state: 0.5, draws=2)
    assert list(found) == ["propagate", "identity", "barycentre", "sinkhorn"]
    assert [row["runs"] for row in found.values()] == [1, 1, 1, 2]
    best = align.universe(models, symmetry).objective
    assert found["propagate"]["objective"] == pytest.approx(best)


def test_planes_pass_through_the_networks(models, symmetry, split):
    found = landscapes.planes(models, symmetry, split, resolution=3)
    assert set(found) == {"as trained", "C²M³"}
    for plane in found.values():
        assert len(plane["accuracies"]) == len(plane["ys"]) == 3
        assert len(plane["corners"]) == 3
