"""Recipes: read in two dialects, validated, and turned into a merge."""

from merganser.engine.merge import Merge
from merganser.engine.plan import Model, Output, Plan, Source
from merganser.recipes.json_schema import recipe_schema
from merganser.recipes.loading import load
from merganser.recipes.planning import plan, prepare
from merganser.recipes.schema import Recipe

__all__ = ["Merge", "Model", "Output", "Plan", "Recipe", "Source", "load", "plan", "prepare", "recipe_schema"]
