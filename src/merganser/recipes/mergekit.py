"""mergekit's dialect, as `mergekit-yaml` reads it, and named stages as `mergekit-multi` does.

Facts the reader relies on: a list is a gradient over depth; a list of `{filter, value}` is a choice by substring,
where no filter or "*" matches everything; a value is looked up in the source, the output slice, the module, the whole
recipe, in this order; a per-model filter sees the name in the source, a global one the name in the output.
One key is ours: `exclude`, globs over tensors to leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from merganser.errors import RecipeError, did_you_mean
from merganser.methods.parameters import Parameter
from merganser.methods.registry import lookup, mergekit_defaults
from merganser.recipes import fields
from merganser.recipes.fields import Declared, expect, kind_of, known_keys
from merganser.recipes.mergekit_parameters import KNOWN, REMARKS, acting, required, without_effect
from merganser.recipes.schema import Entry, OutputKeys, OutputOptions, Part, Problems, Recipe, Slice, Written
from merganser.recipes.settings import Case, Choice

KEYS = (
    "merge_method",
    "models",
    "slices",
    "modules",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
    "chat_template",
    "name",
    "exclude",
)
#: Keys of older versions, of other places or of the command line, which mergekit ignores at the top of a recipe.
_ELSEWHERE = {
    "pad_to_multiple_of": "under tokenizer it has one",
    "random_seed": "mergekit takes it from its command line; here the draws follow the recipe's seed, which is 0",
}
Nested = Callable[[Any, str], Recipe]


#: Configurations of mergekit's other programs: a key only they have -> what they are, and what to do instead.
_OTHER_TOOLS = {
    "experts": (
        "a mixture-of-experts configuration (mergekit-moe)",
        "see merganser library for models of many experts",
    ),
    "gate_mode": (
        "a mixture-of-experts configuration (mergekit-moe)",
        "see merganser library for models of many experts",
    ),
    "genome": ("a search configuration (mergekit-evolve)", "merganser searches with: merganser evolve run"),
    "donor": ("a tokenizer transplant (mergekit-tokensurgeon)", "output.tokenizer unites vocabularies within a merge"),
    "layer_slices": ("a bakllama configuration", "write it as slices: [{sources: [{model: …, layer_range: [a, b]}]}]"),
}


def refuse_other_tools(data: Mapping[str, Any]) -> None:
    """An error that names what a file is, if it is no merge."""
    found = [tool for key, tool in _OTHER_TOOLS.items() if key in data]
    if data.get("merge_method", data.get("method")) == "moe":
        found = [_OTHER_TOOLS["experts"]]
    elif "merge_method" in data or "method" in data:
        return
    if found:
        what, instead = found[0]
        raise RecipeError(f"this is {what}, not a merge; {instead}")


def speaks(data: Mapping[str, Any]) -> bool:
    """Whether a document is in this dialect: by its method, or without one by keys of no other dialect."""
    ours = {"base_model", "modules", "dtype", "out_dtype", "tokenizer_source"}
    return "merge_method" in data or ("method" not in data and bool(ours & set(data)))


def read(
    data: Mapping[str, Any],
    nested: Nested,
    stages: Mapping[str, Recipe],
    root: Path | None,
    written: Written,
    source: str,
) -> Recipe:
    """The recipe in `data`; `stages` are earlier named merges, usable like models."""
    reader = _MergekitReader(nested, stages)
    recipe = reader.recipe(data, root, written)
    fields.finish(reader.problems, reader.references, root, source)
    assert recipe is not None
    return recipe


class _MergekitReader:
    def __init__(self, nested: Nested, stages: Mapping[str, Recipe]) -> None:
        self.problems = Problems()
        self.notes: list[str] = []
        self.nested = nested
        self.stages = stages
        #: Every path and hub id, with its place.
        self.references: list[tuple[str, str]] = []
        self.declared = Declared(())
        self.called = ""

    def recipe(self, data: Mapping[str, Any], root: Path | None, written: Written) -> Recipe | None:
        problems = self.problems
        method = None
        with problems.collect():
            self.called = expect(data.get("merge_method"), str, "merge_method")
            method = lookup(self.called, "merge_method")
            self.declared = Declared((method,), acting(self.called, method))
        known_keys(self._without_strays(data), KEYS, "", problems)
        base = self._model(data["base_model"], "base_model") if data.get("base_model") is not None else None
        parts = self._parts(data)
        parameters = self._settings(data.get("parameters"), "parameters")
        output = self._output(data)
        if method is None:
            return None
        return Recipe(
            method=method.name,
            parts=parts,
            base=base,
            parameters=parameters,
            defaults=mergekit_defaults(method),
            required=required(self.called),
            filter_by_source=True,
            widest_dtype=True,
            base_is_model=True,
            depth_after_layers=0.0,
            output=output,
            keys=_output_keys(data),
            notes=tuple(dict.fromkeys(self.notes)),
            written=written,
            root=root,
        )

    def _without_strays(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document without the keys that are known elsewhere but not at its top: noted, as mergekit ignores
        them there."""
        kept = {}
        for key, value in data.items():
            reason = _ELSEWHERE.get(str(key))
            if reason is None and self.declared.find(str(key)) is not None:
                reason = "under parameters it has one"
            reason = reason or self._without_effect(str(key))
            if key in KEYS or reason is None:
                kept[key] = value
            else:
                self.notes.append(f"{key} has no effect at the top of a recipe: {reason}")
        return kept

    def _parts(self, data: Mapping[str, Any]) -> tuple[Part, ...]:
        given = [key for key in ("models", "slices", "modules") if data.get(key)]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            self.problems.add("", f"expected exactly one of models, slices and modules, got {got}")
            return ()
        if given != ["modules"]:
            return (self._part(data, given[0], given[0], None),)
        with self.problems.collect():
            modules = expect(data["modules"], dict, "modules")
            parts = []
            for name, raw in modules.items():
                where = f"modules.{name}"
                expect(raw, dict, where)
                known_keys(raw, ("models", "slices", "parameters"), where, self.problems)
                inner = [key for key in ("models", "slices") if raw.get(key)]
                if len(inner) != 1:
                    raise RecipeError(f"{where}: expected either models or slices")
                parts.append(self._part(raw, inner[0], f"{where}.{inner[0]}", str(name)))
            return tuple(parts)
        return ()

    def _part(self, data: Mapping[str, Any], key: str, where: str, module: str | None) -> Part:
        parameters = self._settings(data.get("parameters"), f"modules.{module}.parameters") if module else {}
        with self.problems.collect():
            raw = expect(data[key], list, where)
            if key == "models":
                entries = [self._entry(each, f"{where}[{i}]", ("model", "parameters")) for i, each in enumerate(raw)]
                return Part((Slice(tuple(e for e in entries if e), where),), module, parameters)
            slices = [self._slice(each, f"{where}[{i}]") for i, each in enumerate(raw)]
            return Part(tuple(s for s in slices if s), module, parameters)
        return Part((), module, parameters)

    def _slice(self, raw: Any, where: str) -> Slice | None:
        with self.problems.collect():
            expect(raw, dict, where)
            known_keys(raw, ("sources", "base_model", "residual_weight", "parameters"), where, self.problems)
            if raw.get("residual_weight") is not None:
                self.notes.append(f"{where}.residual_weight has no effect (in mergekit neither)")
            base = self._model(raw["base_model"], f"{where}.base_model") if raw.get("base_model") is not None else None
            parameters = self._settings(raw.get("parameters"), f"{where}.parameters")
            sources = expect(raw.get("sources"), list, f"{where}.sources")
            entries = [
                self._entry(each, f"{where}.sources[{i}]", ("model", "layer_range", "parameters"))
                for i, each in enumerate(sources)
            ]
            if not entries:
                raise RecipeError(f"{where}.sources: expected at least one model")
            return Slice(tuple(e for e in entries if e), where, base, parameters)
        return None

    def _entry(self, raw: Any, where: str, keys: tuple[str, ...]) -> Entry | None:
        if not isinstance(raw, dict):
            self.problems.add(where, f"expected a mapping with the key model, got {kind_of(raw)}")
            return None
        known_keys(raw, keys, where, self.problems)
        layers = None
        with self.problems.collect():
            if "layer_range" in keys:
                layers = fields.layer_range(raw.get("layer_range"), f"{where}.layer_range")
        parameters = self._settings(raw.get("parameters"), f"{where}.parameters")
        for name in list(parameters):
            if not any(p.per_model for p in self.declared.known[name]):
                self.notes.append(f"{where}.parameters.{name} has no effect: it is one value for the whole merge")
                del parameters[name]
        if "model" not in raw:
            self.problems.add(where, "says no model")
            return None
        entry = self._model(raw["model"], f"{where}.model")
        return Entry(entry.label, where, entry.recipe, layers, parameters) if entry else None

    def _model(self, raw: Any, where: str) -> Entry | None:
        with self.problems.collect():
            if isinstance(raw, dict) and ("merge_method" in raw or "method" in raw):
                return Entry(where, where, self.nested(raw, where))
            reference = _reference(raw, where)
            if reference in self.stages:
                return Entry(reference, where, self.stages[reference])
            if reference.endswith((".yml", ".yaml")):
                return Entry(reference, where, self.nested(reference, where))
            self.references.append((where, reference))
            return Entry(reference, where)
        return None

    def _settings(self, raw: Any, where: str) -> dict[str, Any]:
        def ignored(name: str) -> bool:
            reason = self._without_effect(name)
            if reason is not None:
                self.notes.append(f"{where}.{name} has no effect: {reason}")
            return reason is not None

        if not self.declared.methods:
            return {}  # parameters cannot be judged without their method, and would only add noise
        for name in raw if isinstance(raw, dict) else ():
            if remark := REMARKS.get((self.called, str(name))):
                self.notes.append(f"{where}.{name}: {remark}")
        return fields.settings(raw, self.declared, where, self.problems, by_filter, ignored)

    def _without_effect(self, name: str) -> str | None:
        """Return why a parameter has no effect; of an unknown method, every parameter of mergekit's has none."""
        if self.declared.methods:
            return without_effect(name, self.called, self.declared.methods[0])
        return "the method is unknown" if name in KNOWN else None

    def _output(self, data: Mapping[str, Any]) -> OutputOptions:
        options: dict[str, Any] = {}
        for key in ("dtype", "out_dtype"):
            with self.problems.collect():
                if data.get(key) is not None:
                    options["dtype"] = fields.dtype(data[key], key)
        if data.get("dtype") and data.get("out_dtype"):
            self.notes.append("dtype: arithmetic is in float32 whatever dtype says; out_dtype is what is written")
        if data.get("tokenizer_source") is not None and data.get("tokenizer") is not None:
            self.problems.add("tokenizer", "tokenizer and tokenizer_source exclude each other")
        elif data.get("tokenizer") is not None:
            options["tokenizer"] = fields.tokenizer(data["tokenizer"], "tokenizer", self.problems, "union")
        elif data.get("tokenizer_source") is not None:
            with self.problems.collect():
                # mergekit's older spelling of a model.
                source = _reference(data["tokenizer_source"], "tokenizer_source").removeprefix("model:")
                options["tokenizer"] = fields.tokenizer(source, "tokenizer_source", self.problems, "union")
        with self.problems.collect():
            options["exclude"] = fields.globs(data.get("exclude"), "exclude")
        with self.problems.collect():
            if data.get("chat_template") is not None:
                options["chat_template"] = expect(data["chat_template"], str, "chat_template")
        return OutputOptions(**options)


def _output_keys(data: Mapping[str, Any]) -> OutputKeys:
    tokenizer = "tokenizer" if data.get("tokenizer") is not None else "tokenizer_source"
    return OutputKeys("dtype", tokenizer, "chat_template", "exclude")


def _reference(raw: Any, where: str) -> str:
    """`path@revision+lora`, also when written as a mapping."""
    if isinstance(raw, dict):
        inner = raw.get("model", raw)
        if isinstance(inner, dict):
            path = expect(inner.get("path"), str, f"{where}.path")
            inner = f"{path}@{inner['revision']}" if inner.get("revision") else path
        lora = raw.get("lora")
        return f"{expect(inner, str, where)}+{_reference(lora, f'{where}.lora')}" if lora else expect(inner, str, where)
    reference: str = expect(raw, str, where)
    if not reference.strip():
        raise RecipeError(f"{where}: an empty path")
    return reference


def by_filter(value: Any, candidates: list[Parameter], where: str) -> Choice | None:
    """`[{filter: mlp, value: 0.5}, {value: 0}]`: the first whose filter is part of the tensor's name."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not any(isinstance(each, dict) for each in value):
        return None
    cases = []
    for i, each in enumerate(value):
        place = f"{where}[{i}]"
        if not isinstance(each, dict) or "value" not in each:
            raise RecipeError(f"{place}: expected {{filter, value}}, got {kind_of(each)}")
        for key in each:
            if key not in ("filter", "value"):
                raise RecipeError(f"{place}: unknown key {key!r}{did_you_mean(str(key), ('filter', 'value'))}")
        pattern = each.get("filter")
        if pattern is not None:
            expect(pattern, str, f"{place}.filter")
        chosen = fields.scalar_or_gradient(each["value"], candidates, f"{place}.value")
        cases.append(Case(None if pattern == "*" else pattern, chosen, "substring"))
    return Choice(tuple(cases))
