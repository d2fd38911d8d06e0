"""Merging with data: the autopilot, statistics as side checkpoints, AdaMerging, AdaRank, RegMean++, ATM, soups, scales.

Start with `auto`, which chooses a method and its scale and may advise against merging; or with `adamerge`,
`greedy_soup` and `choose_scale`. Each returns the merged weights and a record of the search. `diagonal_fisher` and
`linear_grams` compute the statistics for `mg.merge(..., "fisher" | "regmean", statistics=…)`; `esm` uses Gram matrices
too. `pseudo_label` lets you choose without labelled data, and `Continual` adds experts to a merge one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "adamerging": ("adamerge",),
        "continual": ("Continual",),
        "autopilot.decisions": ("Decision",),
        "autopilot.pilot": ("auto",),
        "fisher": ("diagonal_fisher",),
        "gram": ("linear_grams",),
        "merged_grams": ("regmean_pp",),
        "pseudo_labels": ("pseudo_label",),
        "ranks": ("adarank",),
        "scales": ("choose_scale",),
        "soups": ("greedy_soup",),
        "validation": ("Validation",),
    },
    modules=(
        "adamerging",
        "atm",
        "continual",
        "fisher",
        "forgetting",
        "gram",
        "merged_grams",
        "parts",
        "pseudo_labels",
        "ranks",
        "scales",
        "soups",
        "statistics",
        "sweep",
        "validation",
    ),
)

if TYPE_CHECKING:
    from merganser.tuning import adamerging as adamerging
    from merganser.tuning import atm as atm
    from merganser.tuning import continual as continual
    from merganser.tuning import fisher as fisher
    from merganser.tuning import forgetting as forgetting
    from merganser.tuning import gram as gram
    from merganser.tuning import merged_grams as merged_grams
    from merganser.tuning import parts as parts
    from merganser.tuning import pseudo_labels as pseudo_labels
    from merganser.tuning import ranks as ranks
    from merganser.tuning import scales as scales
    from merganser.tuning import soups as soups
    from merganser.tuning import statistics as statistics
    from merganser.tuning import sweep as sweep
    from merganser.tuning import validation as validation
    from merganser.tuning.adamerging import adamerge as adamerge
    from merganser.tuning.autopilot.decisions import Decision as Decision
    from merganser.tuning.autopilot.pilot import auto as auto
    from merganser.tuning.continual import Continual as Continual
    from merganser.tuning.fisher import diagonal_fisher as diagonal_fisher
    from merganser.tuning.gram import linear_grams as linear_grams
    from merganser.tuning.merged_grams import regmean_pp as regmean_pp
    from merganser.tuning.pseudo_labels import pseudo_label as pseudo_label
    from merganser.tuning.ranks import adarank as adarank
    from merganser.tuning.scales import choose_scale as choose_scale
    from merganser.tuning.soups import greedy_soup as greedy_soup
    from merganser.tuning.validation import Validation as Validation
