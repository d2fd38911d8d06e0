"""Several universes, chosen by a score of the merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from align_networks import mlp, trained_like

from merganser.align import choose_universe, merge_many, universe
from merganser.errors import InputError

MODULE, KNOWN = mlp(6, 12, 12, 3)
MODELS = [trained_like(MODULE, seed) for seed in range(3)]


def norm(state: dict[str, torch.Tensor]) -> float:
    return float(sum(tensor.square().sum() for tensor in state.values()))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_highest_score_is_kept(sign: int) -> None:
    choice = choose_universe(MODELS, KNOWN, lambda state: sign * norm(state), tries=2, seed=4)
    names = [one.name for one in choice.candidates]
    assert names[:2] == ["C²M³ from propagate", "C²M³ from barycentre"]
    assert names[2:] == [f"{kind}, seed {s}" for s in (4, 5) for kind in ("C²M³ from sinkhorn", "MergeMany")]
    best = max(one.score for one in choice.candidates)
    assert sign * norm(choice.universe.merged()) == best
    assert len({round(one.score, 4) for one in choice.candidates}) > 1


def test_the_candidates_are_the_plain_ones() -> None:
    choice = choose_universe(MODELS, KNOWN, norm, tries=1, seed=7)
    expected = [
        universe(MODELS, KNOWN),
        universe(MODELS, KNOWN, start="barycentre"),
        universe(MODELS, KNOWN, start="sinkhorn", seed=7),
        merge_many(MODELS, KNOWN, seed=7),
    ]
    np.testing.assert_allclose([one.objective for one in choice.candidates], [u.objective for u in expected])
    assert len(choose_universe(MODELS, KNOWN, norm, tries=0).candidates) == 2


def test_wrong_choices() -> None:
    with pytest.raises(InputError, match="not a number"):
        choose_universe(MODELS, KNOWN, lambda state: float("nan"))
    with pytest.raises(InputError, match="at least 0"):
        choose_universe(MODELS, KNOWN, norm, tries=-1)
    with pytest.raises(InputError, match="at least 2 models"):
        choose_universe(MODELS[:1], KNOWN, norm)
