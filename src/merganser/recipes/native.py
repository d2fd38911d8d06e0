"""The native dialect.

    method: ties
    base: ./base
    models:
      - {path: ./math, weight: 0.6}          # parameters of the method beside the path
      - ./code
      - {recipe: ./stage.yml, weight: 0.2}   # or a recipe written out
    parameters: {density: [0.2, 0.5]}        # a list is a gradient over depth
    overrides:
      - {match: "*.embed_tokens.*", method: linear}
    output: {dtype: bfloat16, shard_size: 5GB, tokenizer: base}
    seed: 0

Methods that need statistics (fisher, regmean) take the path of each model's statistics beside its path, `{path: ./math,
fisher: ./math.fisher.safetensors}`, or for all models in order, `statistics: {fisher: [...]}`.

A parameter may also depend on the tensor name: `density: {"*.mlp.*": 0.2, "*": 0.5}`, first match wins. Instead of
`models`, `slices` stack layers: each slice is a model entry with `layers: [first, last)`, or `{models: [...]}` of such.
`modules: {name: {models: ...}}` gives parts of the network their own models. `conventions` settles ambiguities in the
meaning of a recipe (`schema.Conventions`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from merganser.errors import RecipeError, did_you_mean
from merganser.methods.registry import lookup
from merganser.recipes import fields, options
from merganser.recipes.checkpoint_globs import expand
from merganser.recipes.fields import REPORTED, Declared, expect, kind_of, misspelt, report_unknown_keys
from merganser.recipes.keys import ENTRY, MODULE, OUTPUT, OVERRIDE, RECIPE, SLICE, read_section
from merganser.recipes.mergekit import Translation
from merganser.recipes.schema import (
    Entry,
    Override,
    Part,
    Places,
    Problems,
    Recipe,
    Slice,
    Written,
)

Nested = Callable[[Any, str], Recipe]
#: Limit on the entries of a list of models, slices or overrides.
_MOST = 10_000


def read(
    made: Translation,
    nested: Nested,
    root: Path | None,
    written: Written,
    source: str,
    held: Collection[str] = (),
) -> Recipe:
    """Return the recipe in a document.

    `nested` reads a recipe inside it (a mapping, or the path of a file); models in `held` are in memory.
    """
    # A mapping without a file may name models that are in memory.
    reader = _NativeReader(nested, made.places, root, globs=isinstance(written, str) or root is not None)
    recipe = reader.recipe(made.document, root, written)
    made.problems.absorb(reader.problems, made.places)
    fields.finish(made.problems, [each for each in reader.references if each[1] not in held], root, source)
    assert recipe is not None
    return replace(recipe, places=made.places, notes=tuple(dict.fromkeys(made.notes)))


class _NativeReader:
    def __init__(self, nested: Nested, places: Places, root: Path | None, globs: bool) -> None:
        self.problems = Problems()
        self.places, self.named = places, places.rename
        self.nested, self.root, self.globs = nested, root, globs
        #: Every path and hub id, with its place.
        self.references: list[tuple[str, str]] = []
        #: Parameters cannot be checked without a known method; reporting them would only add noise.
        self.judges = True

    def recipe(self, data: Mapping[str, Any], root: Path | None, written: Written) -> Recipe | None:
        problems = self.problems
        own = read_section(RECIPE, data, "", problems, {"output": OUTPUT})
        main = None
        methods = []
        given = data.get("method")
        if given is None and "method" not in misspelt(data, RECIPE):
            problems.add("method", "is missing; `merganser methods` lists the methods")
        elif given is not None and given is not REPORTED:
            with problems.collect():
                main = lookup(expect(given, str, "method"))
                methods.append(main)
        raw_overrides = self._read_list(data, "overrides")
        for i, raw in enumerate(raw_overrides):
            if isinstance(raw, dict) and raw.get("method") is not None:
                with problems.collect():
                    methods.append(lookup(expect(raw["method"], str, f"overrides[{i}].method"), f"overrides[{i}]"))
        self.judges = main is not None
        declared = Declared(methods)
        base = None
        if data.get("base") is not None:
            base = self._read_entry(data["base"], "base", Declared(()))
            if base is not None and base.layers:
                problems.add("base.layers", "a base always has all of its layers")
        parts = self._add_statistics(self._read_parts(data, declared), data.get("statistics"), declared)
        overrides = [self._read_override(raw, f"overrides[{i}]", declared) for i, raw in enumerate(raw_overrides)]
        parameters = self._read_settings(data.get("parameters"), declared, "parameters")
        output = options.read_output(data.get("output"), problems)
        conventions = options.read_conventions(data.get("conventions"), problems)
        if own.get("match_experts") and any(part.sliced for part in parts):
            problems.add("match_experts", "experts are matched layer by layer; a recipe with slices moves layers")
        if main is None:
            return None
        return Recipe(
            method=main.name,
            parts=parts,
            base=base,
            parameters=parameters,
            overrides=tuple(o for o in overrides if o),
            output=output,
            conventions=conventions,
            written=written,
            root=root,
            **own,
        )

    def _read_list(self, data: Mapping[str, Any], key: str, prefix: str = "") -> list[Any]:
        with self.problems.collect():
            return _bound(expect(data.get(key) or [], list, f"{prefix}{key}"), f"{prefix}{key}")
        return []

    def _read_parts(self, data: Mapping[str, Any], declared: Declared) -> tuple[Part, ...]:
        given = [key for key in ("models", "slices", "modules") if data.get(key) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            if given or not misspelt(data, RECIPE) & {"models", "slices", "modules"}:
                self.problems.add("", f"expected exactly one of models, slices and modules, got {got}")
            return ()
        if given != ["modules"]:
            return (self._read_part(data, given[0], "", declared),)
        parts = []
        with self.problems.collect():
            modules = {} if data["modules"] is REPORTED else expect(data["modules"], dict, "modules")
            for name, raw in modules.items():
                where = f"modules.{name}"
                report_unknown_keys(expect(raw, dict, where), MODULE, where, self.problems)
                inner = [key for key in ("models", "slices") if raw.get(key) is not None]
                if len(inner) != 1:
                    raise RecipeError(f"{where}: expected either models or slices")
                part = self._read_part(raw, inner[0], f"{where}.", declared)
                parameters = self._read_settings(raw.get("parameters"), declared, f"{where}.parameters")
                parts.append(replace(part, module=str(name), parameters=parameters))
        return tuple(parts)

    def _read_part(self, data: Mapping[str, Any], key: str, prefix: str, declared: Declared) -> Part:
        if key == "models":
            entries = self._read_models(data[key], f"{prefix}models", declared)
            for entry in entries:
                if entry.layers:
                    self.problems.add(f"{entry.where}.layers", "layers can only be chosen in slices, not in models")
            return Part((Slice(entries, self.named(f"{prefix}models")),))
        raws = self._read_list(data, key, prefix)
        each = [(f"{prefix}slices[{i}]", raw) for i, raw in enumerate(raws) if raw is not REPORTED]
        found = [self._read_slice(raw, where, declared) for where, raw in each]
        if not raws and not self.problems:
            self.problems.add(f"{prefix}slices", "expected at least one slice")
        return Part(tuple(found))

    def _read_slice(self, raw: Any, where: str, declared: Declared) -> Slice:
        if isinstance(raw, dict) and "models" in raw:
            report_unknown_keys(raw, SLICE, where, self.problems)
            entries = self._read_models(raw["models"], f"{where}.models", declared)
            base = self._read_entry(raw["base"], f"{where}.base", Declared(())) if raw.get("base") is not None else None
            parameters = self._read_settings(raw.get("parameters"), declared, f"{where}.parameters")
            found = Slice(entries, self.named(where), base, parameters)
        else:
            single = self._read_entry(raw, where, declared)
            found = Slice((single,) if single is not None else (), self.named(where))
        for entry in found.models:
            if entry.layers is None:
                self.problems.add(entry.where, "a slice needs its layers: layers: [first, last)")
        return found

    def _read_models(self, raw: Any, where: str, declared: Declared) -> tuple[Entry, ...]:
        if not isinstance(raw, list) or not raw:
            self.problems.add(where, f"expected a list of models, got {'an empty list' if raw == [] else kind_of(raw)}")
            return ()
        with self.problems.collect():
            raw = _bound(expand(_bound(raw, where), self.root, where) if self.globs else raw, where)
            entries = [self._read_entry(each, f"{where}[{i}]", declared) for i, each in enumerate(raw)]
            return tuple(entry for entry in entries if entry)
        return ()

    def _read_entry(self, raw: Any, where: str, declared: Declared) -> Entry | None:
        with self.problems.collect():
            if raw is REPORTED:
                return None
            if isinstance(raw, str):
                return self._read_reference(raw, where)
            expect_entry(raw, where)
            if any(key in raw for key in ("method", "merge_method", "expression")):
                return Entry(where, where, recipe=self.nested(raw, where))
            return self._read_mapping(raw, where, declared)
        return None

    def _read_reference(self, path: str, where: str) -> Entry:
        if not path.strip():
            raise RecipeError(f"{where}: an empty path")
        if path.endswith((".yml", ".yaml")):
            return Entry(path, self.named(where), recipe=self.nested(path, where))
        self.references.append((self.places.get(f"{where}.path", self.named(where)), path))
        return Entry(path, self.named(where))

    def _read_mapping(self, raw: Mapping[str, Any], where: str, declared: Declared) -> Entry:
        if ("path" in raw) == ("recipe" in raw):
            raise RecipeError(f"{where}: expected either path or recipe, got {_keys_instead(raw)}")
        if "path" in raw:
            entry = self._read_reference(expect(raw["path"], str, f"{where}.path"), where)
        else:
            recipe = self.nested(raw["recipe"], self.named(f"{where}.recipe"))
            entry = Entry(raw["recipe"] if isinstance(raw["recipe"], str) else where, self.named(where), recipe=recipe)
        layers: tuple[int, int] | None = None
        statistics = {}
        with self.problems.collect():
            label = expect(raw.get("label", entry.label), str, f"{where}.label")
            if label != entry.label and entry.recipe is None:
                raise RecipeError(f"{where}.label: only a nested recipe has a label; a model is named by its path")
            entry = replace(entry, label=label)
        if "window" in raw:
            self.problems.add(
                f"{where}.window", "only a glob over checkpoints, such as ./run/checkpoint-*, has a window"
            )
        with self.problems.collect():
            if raw.get("layers") is not None:
                layers = (0, 1)  # any valid value, so that missing layers are not reported too
                layers = fields.read_layer_range(raw["layers"], f"{where}.layers")
        kinds = statistics_of(declared)
        with self.problems.collect():
            statistics = {kind: expect(raw[kind], str, f"{where}.{kind}") for kind in kinds if kind in raw}
        prefixes: dict[str, str] = {}
        with self.problems.collect():
            for key, value in expect(raw.get("map", {}), dict, f"{where}.map").items():
                prefixes[expect(key, str, f"{where}.map")] = expect(value, str, f"{where}.map[{key!r}]")
        parameters = self._read_own_parameters(raw, (*ENTRY, *kinds), where, declared)
        for name in parameters:
            if not any(p.per_model for p in declared.known[name]):
                self.problems.add(
                    f"{where}.{name}", "is one value for all models of a merge; move it to the recipe's parameters"
                )
        return replace(entry, layers=layers, parameters=parameters, statistics=statistics, map=prefixes)

    def _add_statistics(self, parts: tuple[Part, ...], raw: Any, declared: Declared) -> tuple[Part, ...]:
        """Distribute statistics that are given for all models at once, `{fisher: [path, path]}`."""
        if raw is None or not parts or not parts[0].slices:
            return parts
        with self.problems.collect():
            expect(raw, dict, "statistics")
            report_unknown_keys(raw, statistics_of(declared), "statistics", self.problems)
            models = parts[0].slices[0].models
            if len(parts[0].slices) > 1 or parts[0].sliced:
                raise RecipeError("statistics: with slices, write statistics beside each model")
            for kind, paths in raw.items():
                where = f"statistics.{kind}"
                if len(expect(paths, list, where)) != len(models):
                    raise RecipeError(f"{where}: {len(paths)} paths for {len(models)} models")
                each = [expect(path, str, f"{where}[{i}]") for i, path in enumerate(paths)]
                models = tuple(
                    replace(model, statistics={**model.statistics, kind: path})
                    for model, path in zip(models, each, strict=True)
                )
            return (replace(parts[0], slices=(replace(parts[0].slices[0], models=models),)),)
        return parts

    def _read_own_parameters(
        self, raw: Mapping[str, Any], keys: tuple[str, ...], where: str, declared: Declared
    ) -> dict[str, Any]:
        """Return parameters written beside an entry's own keys, or under `parameters`."""
        if not self.judges:
            return {}
        beside = {key: value for key, value in raw.items() if key not in keys}
        for key in list(beside):
            if declared.find(str(key)) is None:
                words = [*keys, *declared.names]
                self.problems.add(where, f"unknown key or parameter {key!r}{did_you_mean(str(key), words)}")
                del beside[key]
        found = fields.read_settings(beside, declared, where, self.problems)
        under = self._read_settings(raw.get("parameters"), declared, f"{where}.parameters")
        for name in found.keys() & under.keys():
            self.problems.add(f"{where}.{name}", "is given twice, here and under parameters")
        return found | under

    def _read_settings(self, raw: Any, declared: Declared, where: str) -> dict[str, Any]:
        return fields.read_settings(raw, declared, where, self.problems) if self.judges else {}

    def _read_override(self, raw: Any, where: str, declared: Declared) -> Override | None:
        with self.problems.collect():
            expect(raw, dict, where)
            match = fields.read_globs(raw.get("match"), f"{where}.match")
            if not match:
                got = "" if "match" in raw else f", got {_keys_instead(raw)}"
                raise RecipeError(f"{where}.match: names no tensors; expected globs over tensor names{got}")
            method = raw.get("method")
            own = declared
            if isinstance(method, str):
                own = Declared([m for m in declared.methods if m.name == method])
            if own.methods or not self.judges:
                model = raw.get("model")
                if model is not None:
                    expect(model, str, f"{where}.model")
                if not any(key not in ("match",) for key in raw):
                    raise RecipeError(f"{where}: changes nothing; expected a method, a model or parameters")
                return Override(
                    match, where, method, model, self._read_own_parameters(raw, tuple(OVERRIDE), where, own)
                )
        return None


def _keys_instead(raw: Mapping[str, Any]) -> str:
    """Return the keys of a mapping that lacks one, or has two that exclude each other, for a message."""
    if "path" in raw:
        return "both"
    if "model" in raw:
        return "model (which is mergekit's word, for recipes with merge_method)"
    return ", ".join(map(str, raw)) or "an empty mapping"


def _bound(entries: list[Any], where: str) -> list[Any]:
    """Return the entries of a list, or refuse a list so long that reading it would seem to hang."""
    if len(entries) > _MOST:
        raise RecipeError(
            f"{where}: {len(entries):,} entries; at most {_MOST:,} are read, so nest recipes to merge more"
        )
    return entries


def statistics_of(declared: Declared) -> tuple[str, ...]:
    """Return the kinds of side checkpoints that the recipe's methods read."""
    return tuple(dict.fromkeys(kind for method in declared.methods for kind in method.statistics))


def expect_entry(raw: Any, where: str) -> None:
    if not isinstance(raw, dict):
        raise RecipeError(f"{where}: expected a path, a mapping with a path, or a recipe, got {kind_of(raw)}")
