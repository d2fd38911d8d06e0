"""What is no choice, or has no names, is refused before anything else is looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import merganser as mg
from merganser import align, analysis, federated, library, routing, tuning
from merganser.align.initialisation import start_placings
from merganser.errors import InputError, first_line
from merganser.evolve import estimators

NOTHING: Any = None
LINEAR = nn.Linear(2, 2)
BATCHES = [[torch.zeros(1, 2)]] * 2

CHOICES = {
    "wise": lambda word: mg.tuning.adamerge([LINEAR, LINEAR], LINEAR, BATCHES, wise=word),
    "parts": lambda word: mg.tuning.adamerge([LINEAR, LINEAR], LINEAR, BATCHES, parts=word),
    "labels": lambda word: tuning.fisher.diagonal_fisher(LINEAR, [], labels=word),
    "strategy": lambda word: tuning.fisher.diagonal_fisher(LINEAR, [], strategy=word),
    "distance": lambda word: analysis.disentanglement.disentanglement(
        NOTHING, NOTHING, NOTHING, NOTHING, first=[1.0], distance=word
    ),
    "metric": lambda word: analysis.plots.segments({}, word),
    "metric of a plane": lambda word: analysis.plots.plane(NOTHING, word),
    "what": lambda word: analysis.plots.regime(NOTHING, word),
    "fit": lambda word: estimators.p_irt([], NOTHING, NOTHING, fit=word),
    "fit of a mixture": lambda word: estimators.mixture([], NOTHING, NOTHING, [], fit=word),
    "estimator": lambda word: estimators.Estimator(word),
    "start": lambda word: start_placings(NOTHING, 2, word, 0, frozenset()),
    "matching method": lambda word: align.match(LINEAR, LINEAR, NOTHING, word),
    "way to align clients": lambda word: federated.align_clients([], NOTHING, method=word),
    "kind of masks": lambda word: library.MaskLibrary.build(LINEAR, {}, "masks", kind=word),
    "space": lambda word: library.merge_adapters(["one"], "out", space=word),
    "side": lambda word: routing.decode(NOTHING, "expert", "weight", [], NOTHING, side=word),
}


@pytest.mark.parametrize("setting", CHOICES)
def test_a_misspelt_choice_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match=f"unknown {setting.split(' of a ')[0]} 'nonsense'; known: "):
        CHOICES[setting]("nonsense")


@pytest.mark.parametrize(
    "call",
    [
        lambda models: library.Library.build(LINEAR, models, "library"),
        lambda models: library.MaskLibrary.build(LINEAR, models, "masks"),
        lambda models: analysis.mergeability.mergeability(LINEAR, models),
        lambda models: analysis.similarity.weight_similarity(models),
    ],
)
def test_models_that_need_names_are_no_list(call: Any) -> None:
    with pytest.raises(InputError, match=r"(experts|models): expected a mapping from names, .* got a list"):
        call([LINEAR, LINEAR])


def test_a_near_miss_is_named() -> None:
    with pytest.raises(InputError, match=r"unknown strategy 'vmpa'; did you mean 'vmap'\?"):
        tuning.fisher.diagonal_fisher(LINEAR, [], strategy="vmpa")  # type: ignore[arg-type]


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    assert first_line(AssertionError()) == "AssertionError"
    assert first_line(ValueError("\nwhat\nwhere")) == "what"
