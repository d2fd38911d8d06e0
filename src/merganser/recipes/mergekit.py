"""Translate mergekit's dialect (`mergekit-yaml`, and named stages of `mergekit-multi`) into a native document, with
`conventions` where mergekit's meaning differs from ours.

Facts the translation relies on: a list is a gradient over depth; a list of `{filter, value}` is a choice by substring,
where no filter or "*" matches everything; a value is looked up in the source, the output slice, the module and the
whole recipe, in this order; a per-model filter sees the name in the source, a global one the name in the output.
One key is our own: `exclude`, globs over tensors to leave out.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from merganser.errors import RecipeError, did_you_mean
from merganser.methods.registry import lookup, mergekit_defaults
from merganser.recipes import fields
from merganser.recipes.fields import REPORTED, Declared, expect, kind_of, misspelt, report_unknown_keys
from merganser.recipes.mergekit_parameters import (
    KNOWN,
    MORE_PRECISE,
    REMARKS,
    explain_no_effect,
    list_acting,
    list_required,
)
from merganser.recipes.schema import Places, Problems

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
#: Keys of older versions, other places or the command line, which mergekit ignores at the top of a recipe.
_ELSEWHERE = {
    "pad_to_multiple_of": "it belongs under tokenizer",
    "random_seed": "mergekit reads it from its command line; here random draws use the recipe's seed, which is 0",
}


def recognises(data: Mapping[str, Any]) -> bool:
    """Return whether a document is in this dialect: by its method, or by keys that only this dialect has."""
    ours = {"base_model", "modules", "dtype", "out_dtype", "tokenizer_source"}
    models = data.get("models")
    named = isinstance(models, list) and any(isinstance(each, Mapping) and "model" in each for each in models)
    return "merge_method" in data or ("method" not in data and (named or bool(ours & set(data))))


@dataclass
class Translation:
    """A native document, with its relation to the original.

    Attributes:
        document: The recipe in native keys; `fields.REPORTED` replaces values whose problems were reported.
        places: Places of the native document -> places of the original.
        notes: Notes for the author of the original.
        problems: Problems of the original.
    """

    document: dict[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    notes: list[str] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)


def translate(data: Mapping[str, Any], stages: Mapping[str, Any]) -> Translation:
    """Translate a mergekit document into a native one.

    Args:
        data: A document in mergekit's dialect.
        stages: Documents by name; the name can be used as a model.
    """
    return _Translator(stages).translate(data)


class _Translator:
    """Translates a document. Every method takes a value with its place in the native document and in the original."""

    def __init__(self, stages: Mapping[str, Any]) -> None:
        self.stages = stages
        self.made = Translation()
        self.problems, self.notes, self.places = self.made.problems, self.made.notes, self.made.places
        self.declared = Declared(())
        self.called = ""
        self._filtered = self._graded = False

    def translate(self, data: Mapping[str, Any]) -> Translation:
        document = self.made.document
        self.places |= {"method": "merge_method"}
        with contextlib.suppress(RecipeError):  # the native reader reports an unknown method
            self.called = expect(data.get("merge_method"), str, "merge_method")
            self.declared = Declared([method := lookup(self.called)], list_acting(self.called, method))
        if remark := MORE_PRECISE.get(self.called):
            self.notes.append(f"{self.called}: {remark}")
        document["method"] = self.declared.methods[0].name if self.declared.methods else data.get("merge_method")
        if "merge_method" in misspelt(data, KEYS):
            document["method"] = REPORTED
        report_unknown_keys(self._drop_strays(data), KEYS, "", self.problems)
        if data.get("base_model") is not None:
            document["base"] = self._translate_model(data["base_model"], "base", "base_model")
        document |= self._translate_networks(data, "", "")
        if data.get("modules"):
            document["modules"] = self._translate_modules(data["modules"])
        parameters = self._translate_parameters(data.get("parameters"), "parameters", "parameters")
        for name, value in mergekit_defaults(self.declared.methods[0]).items() if self.declared.methods else ():
            given = parameters.setdefault(name, value)
            if isinstance(given, dict):
                given.setdefault("*", value)
        if parameters:
            document["parameters"] = parameters
        document["output"] = self._translate_output(data)
        if conventions := self._choose_conventions(document):
            document["conventions"] = conventions
        return self.made

    def _choose_conventions(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return mergekit's conventions, as far as they make a difference for this document."""
        conventions: dict[str, Any] = {}
        based = any("base" in each for each in document.get("slices", ()) if each is not REPORTED)
        if "base" in document or based or "modules" in document:
            conventions["base_is_model"] = True
        if self._graded or "depth" in self.declared.known:
            conventions["depth_after_layers"] = 0.0
        if self._filtered:
            conventions["filter_by_source"] = True
        if needed := list_required(self.called):
            conventions["required"] = list(needed)
        return conventions

    def _drop_strays(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document without the keys that mergekit ignores at the top but knows elsewhere; note them."""
        kept = {}
        for key, value in data.items():
            reason = _ELSEWHERE.get(str(key))
            if reason is None and self.declared.find(str(key)) is not None:
                reason = "it belongs under parameters"
            reason = reason or self._explain_no_effect(str(key))
            if key in KEYS or reason is None:
                kept[key] = value
            else:
                self.notes.append(f"{key} has no effect at the top of a recipe: {reason}")
        return kept

    def _translate_networks(self, data: Mapping[str, Any], where: str, place: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, translate in (("models", self._translate_entry), ("slices", self._translate_slice)):
            if not data.get(key):
                continue
            here, there = f"{where}{key}", f"{place}{key}"
            found[key] = [REPORTED]
            with self.problems.collect():
                each = enumerate(expect(data[key], list, there))
                found[key] = [translate(raw, f"{here}[{i}]", f"{there}[{i}]") for i, raw in each]
        return found

    def _translate_modules(self, raw: Any) -> Any:
        with self.problems.collect():
            found: dict[str, Any] = {}
            for name, module in expect(raw, dict, "modules").items():
                place = f"modules.{name}"
                expect(module, dict, place)
                report_unknown_keys(module, ("models", "slices", "parameters"), place, self.problems)
                found[str(name)] = self._translate_networks(module, f"{place}.", f"{place}.")
                if parameters := self._translate_parameters(module.get("parameters"), *[f"{place}.parameters"] * 2):
                    found[str(name)]["parameters"] = parameters
            return found
        return REPORTED

    def _translate_slice(self, raw: Any, where: str, place: str) -> Any:
        with self.problems.collect():
            expect(raw, dict, place)
            report_unknown_keys(raw, ("sources", "base_model", "residual_weight", "parameters"), place, self.problems)
            if raw.get("residual_weight") is not None:
                self.notes.append(f"{place}.residual_weight has no effect (nor in mergekit)")
            found: dict[str, Any] = {}
            if raw.get("base_model") is not None:
                found["base"] = self._translate_model(raw["base_model"], f"{where}.base", f"{place}.base_model")
            if parameters := self._translate_parameters(
                raw.get("parameters"), f"{where}.parameters", f"{place}.parameters"
            ):
                found["parameters"] = parameters
            sources = expect(raw.get("sources"), list, f"{place}.sources")
            if not sources:
                raise RecipeError(f"{place}.sources: expected at least one model")
            each = enumerate(sources)
            found["models"] = [
                self._translate_source(source, f"{where}.models[{i}]", f"{place}.sources[{i}]") for i, source in each
            ]
            return found
        return REPORTED

    def _translate_source(self, raw: Any, where: str, place: str) -> Any:
        entry = self._translate_entry(raw, where, place, ("model", "layer_range", "parameters"))
        self.places[f"{where}.layers"] = f"{place}.layer_range"
        with self.problems.collect():
            if isinstance(raw, dict) and raw.get("layer_range") is None:
                fields.read_layer_range(None, f"{place}.layer_range")
            if entry is not REPORTED:
                entry["layers"] = raw["layer_range"]
            return entry
        return REPORTED

    def _translate_entry(
        self, raw: Any, where: str, place: str, keys: tuple[str, ...] = ("model", "map", "parameters")
    ) -> Any:
        if not isinstance(raw, dict):
            self.problems.add(place, f"expected a mapping with the key model, got {kind_of(raw)}")
            return REPORTED
        report_unknown_keys(raw, keys, place, self.problems)
        parameters = self._translate_parameters(raw.get("parameters"), f"{where}.parameters", f"{place}.parameters")
        for name in list(parameters):
            if not any(p.per_model for p in self.declared.known[name]):
                self.notes.append(f"{place}.parameters.{name} has no effect: it is one value for the whole merge")
                del parameters[name]
        if "model" not in raw:
            if "model" not in misspelt(raw, keys):
                self.problems.add(place, "names no model")
            return REPORTED
        model = self._translate_model(raw["model"], where, f"{place}.model")
        self.places[where] = place
        if model is REPORTED:
            return model
        entry = {"path": model} if isinstance(model, str) else model
        if raw.get("map") is not None:
            self.places[f"{where}.map"] = f"{place}.map"
            entry = entry | {"map": raw["map"]}
        return entry | {"parameters": parameters} if parameters else entry

    def _translate_model(self, raw: Any, where: str, place: str) -> Any:
        """Return a path, an entry with a nested recipe, or `REPORTED`."""
        self.places |= dict.fromkeys((where, f"{where}.path", f"{where}.recipe"), place)
        with self.problems.collect():
            if isinstance(raw, dict) and ("merge_method" in raw or "method" in raw):
                return {"recipe": raw, "label": place}
            named = read_reference(raw, place)
            return {"recipe": self.stages[named], "label": named} if named in self.stages else named
        return REPORTED

    def _translate_parameters(self, raw: Any, where: str, place: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if not self.declared.methods or raw is None:
            return found  # without a known method, parameters cannot be checked
        if not isinstance(raw, dict):
            self.problems.add(place, f"expected a mapping of parameters, got {kind_of(raw)}")
            return found
        for name, value in ((str(key), value) for key, value in raw.items()):
            if remark := REMARKS.get((self.called, name)):
                self.notes.append(f"{place}.{name}: {remark}")
            known = self.declared.find(name)
            if known is not None and known[0] in found:
                self.problems.add(f"{place}.{name}", f"{known[0]!r} is given twice, once under another name")
            elif known is not None:
                self.places[f"{where}.{known[0]}"] = f"{place}.{name}"
                with self.problems.collect():
                    found[known[0]] = self._translate_value(value, f"{where}.{known[0]}", f"{place}.{name}")
            elif reason := self._explain_no_effect(name):
                self.notes.append(f"{place}.{name} has no effect: {reason}")
            else:
                self.problems.add(place, self.declared.unknown(name))
        return found

    def _translate_value(self, value: Any, where: str, place: str) -> Any:
        """Translate `[{filter: mlp, value: 0.5}, {value: 0}]` to `{"*mlp*": 0.5, "*": 0}`; keep other values."""
        filters = [value] if isinstance(value, dict) else value
        self._graded |= isinstance(value, list)
        if not isinstance(filters, list) or not any(isinstance(each, dict) for each in filters):
            return value
        self._filtered = True
        found: dict[str, Any] = {}
        for i, each in enumerate(filters):
            here = f"{place}[{i}]"
            if not isinstance(each, dict) or "value" not in each:
                raise RecipeError(f"{here}: expected {{filter, value}}, got {kind_of(each)}")
            for key in each:
                if key not in ("filter", "value"):
                    raise RecipeError(f"{here}: unknown key {key!r}{did_you_mean(str(key), ('filter', 'value'))}")
            text = "*" if each.get("filter") is None else expect(each["filter"], str, f"{here}.filter")
            pattern = "*" if text == "*" else f"*{glob.escape(text)}*"
            if pattern not in found:
                found[pattern] = each["value"]
                self.places[f"{where}[{pattern!r}]"] = f"{here}.value"
        return found

    def _explain_no_effect(self, name: str) -> str | None:
        """Return why a parameter has no effect; with an unknown method, none of mergekit's parameters has one."""
        if self.declared.methods:
            return explain_no_effect(name, self.called, self.declared.methods[0])
        return "the method is unknown" if name in KNOWN else None

    def _translate_output(self, data: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: data[key] for key in ("dtype", "out_dtype") if data.get(key) is not None}
        output: dict[str, Any] = {"dtype": given.get("out_dtype", given.get("dtype", "widest"))}
        self.places |= {"output.dtype": "out_dtype" if "out_dtype" in given else "dtype"}
        if len(given) == 2:
            with self.problems.collect():
                fields.read_dtype(given["dtype"], "dtype")
            self.notes.append("dtype: arithmetic is always in float32; out_dtype sets the dtype of the output")
        tokenizer, source = data.get("tokenizer"), data.get("tokenizer_source")
        self.places["output.tokenizer"] = "tokenizer" if tokenizer is not None else "tokenizer_source"
        if tokenizer is not None and source is not None:
            self.problems.add("tokenizer", "tokenizer and tokenizer_source exclude each other")
        elif tokenizer is not None:
            fills = isinstance(tokenizer, dict) and not tokenizer.get("source")
            output["tokenizer"] = {**tokenizer, "source": "union"} if fills else tokenizer
        elif source is not None:
            with self.problems.collect():
                # mergekit's older spelling of a model.
                output["tokenizer"] = read_reference(source, "tokenizer_source").removeprefix("model:")
        for key in ("chat_template", "exclude"):
            self.places[f"output.{key}"] = key
            if data.get(key) is not None:
                output[key] = data[key]
        return output


def read_reference(raw: Any, where: str) -> str:
    """Return `path@revision+lora`, also for a reference written as a mapping."""
    if isinstance(raw, dict):
        inner = raw.get("model", raw)
        if isinstance(inner, dict):
            path = expect(inner.get("path"), str, f"{where}.path")
            inner = f"{path}@{inner['revision']}" if inner.get("revision") else path
        model: str = expect(inner, str, where)
        return f"{model}+{read_reference(raw['lora'], f'{where}.lora')}" if raw.get("lora") else model
    written: str = expect(raw, str, where)
    if not written.strip():
        raise RecipeError(f"{where}: an empty path")
    return written
