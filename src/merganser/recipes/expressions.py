"""Arithmetic on models as a recipe.

    expression: base + 0.4*(math + code) - toxic
    models: {base: ./base, math: ./math, code: ./code, toxic: ./toxic}

The model called `base` stands for its weights and every other name for its task vector, model − base, so that the line
reads as in the papers. Without a model of that name all names stand for weights: `0.5*a + 0.5*b`. Numbers,
+ − * / and parentheses are supported; the result is a weighted sum, merged by `task_arithmetic` or `linear`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from merganser.errors import RecipeError, did_you_mean
from merganser.recipes.fields import kind_of, report_unknown_keys
from merganser.recipes.keys import EXPRESSION, RECIPE
from merganser.recipes.schema import Problems

BASE = "base"
_LONGEST = 10_000
#: The constant part of a sum, under a key that no model can have.
_NUMBER = ""
WeightedSum = dict[str, float]


def recognises(data: Mapping[str, Any]) -> bool:
    return "expression" in data


def expand(data: Mapping[str, Any], source: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the native recipe that an expression means, and notes on what its author may not have intended."""
    problems = Problems()
    report_unknown_keys(data, EXPRESSION, "", problems)
    models = data.get("models")
    if not isinstance(models, dict) or not models:
        problems.add("models", f"expected a mapping of names to models, got {kind_of(models)}")
    else:
        with problems.collect():
            weights = read_coefficients(data["expression"], models)
            document = _build_document(weights, models)
    problems.finish(source)
    total = math.fsum(weights.values())
    notes = []
    if BASE not in weights and not math.isclose(total, 1.0, abs_tol=1e-9):
        notes.append(f"the factors of the expression sum to {total:g}, not to 1: the weights change their scale")
    kept = {key: data[key] for key in EXPRESSION if key in RECIPE and key != "models" and key in data}
    return document | kept, tuple(notes)


def read_coefficients(expression: Any, models: Mapping[str, Any]) -> WeightedSum:
    """Return the factor of every model in the expression."""
    for name in models:
        if not isinstance(name, str) or not name.isidentifier():
            raise RecipeError(f"models: {name!r} cannot be used in an expression; use letters, digits and _")
    if not isinstance(expression, str) or not expression.strip():
        raise RecipeError(f"expression: expected arithmetic on models, got {kind_of(expression)}")
    if len(expression) > _LONGEST:
        raise RecipeError(f"expression: longer than {_LONGEST} characters")
    try:
        tree = ast.parse(" ".join(expression.split()), mode="eval")
        found: WeightedSum = _Fold(models).visit(tree.body)
    except SyntaxError as error:
        raise RecipeError(f"expression: not valid arithmetic at column {error.offset}: {error.msg}") from None
    except ValueError as error:
        raise RecipeError(f"expression: {error}") from None
    except (RecursionError, MemoryError):
        raise RecipeError("expression: nested too deeply") from None
    if _NUMBER in found:
        raise RecipeError("expression: a number alone is not a model; numbers can only multiply or divide")
    if unused := [name for name in models if name not in found]:
        raise RecipeError(f"models.{unused[0]}: is not used in the expression")
    return found


def _build_document(weights: WeightedSum, models: Mapping[str, Any]) -> dict[str, Any]:
    entries = [_build_entry(models[name], weight) for name, weight in weights.items() if name != BASE and weight != 0]
    if BASE not in models:
        if not entries:
            raise RecipeError("expression: everything cancels")
        return {"method": "linear", "models": entries, "parameters": {"normalize": False}}
    if not math.isclose(weights[BASE], 1.0, abs_tol=1e-9):
        raise RecipeError(
            f"expression: the factor of base is {weights[BASE]:g} and must be 1: the other names are task vectors, "
            "model − base (rename base if all names should mean weights)"
        )
    if not entries:
        raise RecipeError("expression: every task vector cancels; only the base is left")
    return {"method": "task_arithmetic", "base": models[BASE], "models": entries}


def _build_entry(model: Any, weight: float) -> dict[str, Any]:
    if isinstance(model, str):
        return {"path": model, "weight": weight}
    if not isinstance(model, dict):
        raise RecipeError(f"models: expected a path or a recipe for each name, got {kind_of(model)}")
    inner = model if "path" in model or "recipe" in model else {"recipe": model}
    return {**inner, "weight": weight}


class _Fold(ast.NodeVisitor):
    """Folds a syntax tree of arithmetic into one weighted sum."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models

    def visit_Name(self, node: ast.Name) -> WeightedSum:
        if node.id not in self._models:
            raise RecipeError(f"expression: unknown model {node.id!r}{did_you_mean(node.id, self._models)}")
        return {node.id: 1.0}

    def visit_Constant(self, node: ast.Constant) -> WeightedSum:
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            raise RecipeError(f"expression: {node.value!r} is neither a model nor a number")
        return {_NUMBER: _require_finite(node.value)}

    def visit_UnaryOp(self, node: ast.UnaryOp) -> WeightedSum:
        inner: WeightedSum = self.visit(node.operand)
        if isinstance(node.op, ast.UAdd):
            return inner
        if isinstance(node.op, ast.USub):
            return {name: -value for name, value in inner.items()}
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> WeightedSum:
        if not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
            return self.generic_visit(node)
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, (ast.Add, ast.Sub)):
            if (_NUMBER in left) != (_NUMBER in right):
                raise RecipeError(f"expression: a number and a model cannot be added: {ast.unparse(node)}")
            sign = -1.0 if isinstance(node.op, ast.Sub) else 1.0
            names = dict.fromkeys([*left, *right])
            return {name: _require_finite(left.get(name, 0.0) + sign * right.get(name, 0.0)) for name in names}
        if isinstance(node.op, ast.Mult):
            if _NUMBER not in left and _NUMBER not in right:
                raise RecipeError(f"expression: models can be added, not multiplied: {ast.unparse(node)}")
            models, factor = (right, left[_NUMBER]) if _NUMBER in left else (left, right[_NUMBER])
            return {name: _require_finite(value * factor) for name, value in models.items()}
        if _NUMBER not in right:
            raise RecipeError(f"expression: cannot divide by a model: {ast.unparse(node)}")
        if right[_NUMBER] == 0:
            raise RecipeError(f"expression: division by zero: {ast.unparse(node)}")
        return {name: _require_finite(value / right[_NUMBER]) for name, value in left.items()}

    def generic_visit(self, node: ast.AST) -> WeightedSum:
        raise RecipeError(
            f"expression: only names, numbers, + - * / and parentheses are allowed, not {ast.unparse(node)!r}"
        )


def _require_finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RecipeError("expression: a number is too large")
    return number
