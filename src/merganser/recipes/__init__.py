"""Recipes: read in two dialects, validated, and turned into a merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        ".engine.merge": ("Merge",),
        ".engine.plan": ("Model", "Output", "Plan", "Source"),
        "json_schema": ("recipe_schema",),
        "loading": ("load",),
        "planning": ("plan", "prepare"),
        "schema": ("Recipe",),
    },
)

if TYPE_CHECKING:
    from merganser.engine.merge import Merge as Merge
    from merganser.engine.plan import Model as Model
    from merganser.engine.plan import Output as Output
    from merganser.engine.plan import Plan as Plan
    from merganser.engine.plan import Source as Source
    from merganser.recipes.json_schema import recipe_schema as recipe_schema
    from merganser.recipes.loading import load as load
    from merganser.recipes.planning import plan as plan
    from merganser.recipes.planning import prepare as prepare
    from merganser.recipes.schema import Recipe as Recipe
