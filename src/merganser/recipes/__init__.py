"""What the user asked for: recipes in two dialects, checked, and resolved to a plan."""

from merganser.recipes.loading import load
from merganser.recipes.plan import Model, Output, Plan, Source
from merganser.recipes.planning import plan
from merganser.recipes.schema import Recipe

__all__ = ["Model", "Output", "Plan", "Recipe", "Source", "load", "plan"]
