"""Plan the tensors of an output: where each comes from, by which rule, and with which parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from merganser.checkpoints.base import TensorSpec, View
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.ties import contradicts_tie, own_head, says_tied, separable_heads, separates_head
from merganser.engine.merge import RuleKey, rule_key
from merganser.engine.plan import Output, Source
from merganser.errors import RecipeError
from merganser.methods.base import Method
from merganser.methods.registry import build
from merganser.recipes.config_differences import describe_architectures
from merganser.recipes.dtypes import Dtypes
from merganser.recipes.layer_places import check_places, check_shapes
from merganser.recipes.layer_settings import read_kinds
from merganser.recipes.method_models import Roles, assign_roles
from merganser.recipes.mismatches import Mismatches, find_tied_embedding, is_buffer, is_computed
from merganser.recipes.resolve import Scope, find_override
from merganser.recipes.schema import Entry, Recipe
from merganser.recipes.settings import matches
from merganser.recipes.sources import SourceTable
from merganser.recipes.stacking import Restacked, Stacking, TensorJob


class OutputPlanner:
    """Turns jobs into outputs, and computes everything that tensors share only once."""

    def __init__(self, recipe: Recipe, table: SourceTable) -> None:
        self.recipe = recipe
        self.table = table
        self.notes: list[str] = []
        self.stacking = Stacking(recipe, table)
        self.mismatches = Mismatches(recipe, table)
        self._dtype = Element.of(recipe.output.dtype) if recipe.output.dtype else None
        self.dtypes = Dtypes(recipe, table)
        self._roles: dict[tuple[int, int], Roles] = {}
        self._parameters_of: dict[tuple[int, str], dict[str, Any]] = {}
        #: Parameters by role, if they depend on nothing or on the depth alone.
        self._parameters_at: dict[tuple[int, float | None], dict[str, Any]] = {}
        #: Rules by the identity of their parameters.
        self._built: dict[int, Method] = {}
        self._fresh: set[str] = set()
        #: Complaints of rules by place and message, with the tensors they are about.
        self._invalid: dict[tuple[str, str], list[str]] = {}
        self._heads: dict[tuple[int, str], str | None] = {}

    def outputs(self, unified: bool = True) -> list[Output]:
        """Plan every tensor; raise all problems, except for shapes of vocabularies that could not be `unified`."""
        jobs = [job for job in self.stacking.jobs if not self._is_excluded(job.name)]
        known = {job.name for job in jobs}
        problems = self.stacking.problems
        with problems.collect():
            jobs += self._plan_added(known)
            jobs += self._plan_separate_head(known)
        for each in self.stacking.restacked if not problems else ():
            with problems.collect():
                self._check_places(each)
        self.notes += [
            f"the config of {model.label} ties its head to its embedding, but their weights differ: both are merged"
            for model, checkpoint in zip(self.table.models, self.table.checkpoints, strict=True)
            if contradicts_tie(checkpoint)
        ]
        outputs = []
        for job in jobs:
            with problems.collect():
                if (output := self._plan_output(job)) is not None:
                    outputs.append(output)
        for (where, message), names in self._invalid.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            problems.add(f"{where}, tensor {names[0]!r}{others}", message)
        if not outputs and not self.mismatches and not problems:
            why = "everything is excluded" if self.stacking.jobs else f"{self.table.models[0].label} has none"
            raise RecipeError(f"the merge has no tensors: {why}")
        if unified and not self.stacking.problems:
            self.mismatches.add_surplus(known, self.stacking)
        if unified:
            with problems.collect():
                self.mismatches.finish()
        problems.finish()
        self.notes += [*self.stacking.notes, *self.mismatches.notes, *self.dtypes.notes()]
        return outputs

    def rules(self, outputs: Iterable[Output]) -> dict[RuleKey, Method]:
        """Return the rules of outputs that were built to check their parameters."""
        return {rule_key(o): self._built[id(o.parameters)] for o in outputs if id(o.parameters) in self._built}

    def names(self) -> set[str]:
        """Return the names of all tensors the output could have, including excluded and tied ones."""
        tied = self.table.checkpoints[0].aliases()
        return {*(job.name for job in self.stacking.jobs), *self._fresh, *tied}

    def aliases(self, outputs: Iterable[Output]) -> dict[str, str]:
        """Return the tied names of the template, which stay tied."""
        names = {output.name for output in outputs}
        tied = self.table.checkpoints[0].aliases().items()
        return {a: stored for a, stored in tied if stored in names and a not in names and not self._is_excluded(a)}

    def _is_excluded(self, name: str) -> bool:
        return any(matches(glob, name) for glob in self.recipe.output.exclude)

    def _plan_added(self, known: set[str]) -> list[TensorJob]:
        """Return jobs for tensors the template lacks, where an override names the model to take them from."""
        found = []
        part = self.recipe.parts[0]
        for override in self.recipe.overrides:
            if override.model in (None, "base"):
                continue
            index = self.table.find_model(str(override.model), f"{override.where}.model")
            for name in self.table.checkpoints[index].names():
                fresh = name not in known and name not in self.table.checkpoints[0]
                if fresh and not self._is_excluded(name) and find_override(self.recipe, name) is override:
                    known.add(name)
                    self._fresh.add(name)
                    found.append(TensorJob(name, self.stacking.depth_outside(name), part, part.slices[0]))
        return found

    def _plan_separate_head(self, known: set[str]) -> list[TensorJob]:
        """Return the job of a head that a model has of its own, where the template ties its head to the embedding."""
        if len(self.recipe.parts) > 1:
            return []
        part, template = self.recipe.parts[0], self.table.models[0].label
        tied = separable_heads(self.table.checkpoints[0])
        for entry in part.slices[-1].models:
            name = own_head(self.table.checkpoints[self.table.of(entry)])
            if name is not None and name in tied and name not in known and not self._is_excluded(name):
                known.add(name)
                self._fresh.add(name)
                self.notes.append(f"the output has a separate {name!r}, as {entry.label} has; {template} ties it")
                return [TensorJob(name, self.stacking.depth_outside(name), part, part.slices[-1])]
        return []

    def separates_head(self, outputs: Iterable[Output]) -> bool:
        """Return whether the output has a head of its own where the config of the template may tie it."""
        heads = {i: own_head(checkpoint) for i, checkpoint in enumerate(self.table.checkpoints)}
        own = any(source.name == heads[source.model] for output in outputs for source in output.reads)
        template = self.table.checkpoints[0]
        return separates_head(template) or (own and says_tied(template))

    def _check_places(self, each: Restacked) -> None:
        """Refuse stacked layers that do not fit the template's config."""
        used = {0, *(model for model, _ in each.order)}
        if not self.table.config(0) or any(self.table.quantised(model) for model in used):
            return  # codes have other names than weights, and a config of their own
        models = range(len(self.table))

        def counts(layer: int, rest: str) -> bool:
            name = each.stack.name(layer, rest)
            return not is_computed(name) and not self._is_excluded(name)

        why = [f": {other}" if (other := describe_architectures(self.table, i)) else "" for i in models]
        known = read_kinds([self.table.config(i) for i in models], each)
        check_places(each, known, [self.table.models[i].label for i in models], counts, why)
        if not each.unchanged:
            heads = self.table.config(0).get("num_attention_heads")
            outside = [job.name for job in self.stacking.jobs if job.offset is None and not self._is_excluded(job.name)]
            check_shapes(each, known, lambda name: self.table.checkpoints[0].spec(name).shape, heads, outside)

    def _plan_output(self, job: TensorJob) -> Output | None:
        roles = self._assign_roles(job)
        sources = [self._find_source(job, entry) for entry in roles.inputs]
        base = self._find_source(job, roles.base) if roles.base else None
        used = [*sources, *([base] if base else [])]
        for source in used:
            if source.name in self.table.quantised(source.model):
                return self._plan_codes(job, roles, sources, source)
        template = self._find_template(job, base or sources[0])
        spec = self.table.checkpoints[template.model].spec(template.name)
        if is_buffer(job.name, spec):
            self.mismatches.note_copied(job.name, spec, template.model, used)
            return Output(job.name, spec, "passthrough", (template,))
        if not self._fits(job, used):
            return None
        # Without a base, the first model gives the shape; the dtype is the template's unless the recipe sets one.
        shape = self.table.checkpoints[sources[0].model].spec(sources[0].name).shape
        if job.offset is not None:
            usual = self.stacking.shape_of_layers(job.part, job.rest)
            if usual is not None and usual != shape:
                self.mismatches.add_other_layers(job.name, shape, usual, sources[0].model)
                return None
        parameters = self._resolve_parameters(roles, job, [source.name for source in sources])
        output = Output(
            job.name,
            TensorSpec(shape, self._dtype or self.dtypes.choose(spec.element, used)),
            roles.method.name,
            tuple(sources),
            base,
            parameters,
            self._find_statistics(job, roles, sources, shape),
        )
        return self._copy_complex(output)

    def _plan_codes(self, job: TensorJob, roles: Roles, sources: list[Source], code: Source) -> Output | None:
        """Plan quantised weights and their scales, which are copied unchanged or refused."""
        checkpoint = self.table.checkpoints[code.model]
        parameters = self._resolve_parameters(roles, job, [source.name for source in sources])
        spec = checkpoint.spec(code.name)
        output = Output(job.name, spec, roles.method.name, tuple(sources), None, parameters)
        if output.copies and not (isinstance(checkpoint, View) and checkpoint.adapts):
            self.mismatches.add_copied_code(code.name, code.model)
            return output
        self.mismatches.add_quantised(code.name, code.model)
        return None

    def _copy_complex(self, output: Output) -> Output:
        """Return the output as a copy if it is complex: rules are for real numbers. Keeps the dtype."""
        for source in output.reads:
            spec = self.table.checkpoints[source.model].spec(source.name)
            if not spec.element.is_complex:
                continue
            if output.copies:
                return replace(output, spec=spec)
            self.mismatches.add_complex(output.name, self.table.models[source.model].label, spec)
            break
        return output

    def _find_statistics(
        self, job: TensorJob, roles: Roles, sources: list[Source], shape: tuple[int, ...]
    ) -> dict[str, tuple[Source, ...]]:
        """Return the side tensors that a rule needs; a tensor may lack them in all models."""
        found = {}
        for kind in roles.method.statistics:
            if lacking := next((entry for entry in roles.inputs if kind not in entry.statistics), None):
                raise RecipeError(
                    f"{lacking.where}: method {roles.method.name!r} needs the {kind} statistics of {lacking.label}; "
                    f"write `{kind}: path` beside it"
                )
            sides = [self.table.side(entry, kind) for entry in roles.inputs]
            having = [name.name in side for (_, side), name in zip(sides, sources, strict=True)]
            if not all(having):
                if any(having):
                    with_, without = (roles.inputs[having.index(has)].label for has in (True, False))
                    self.mismatches.add(f"{job.name!r} has {kind} statistics of {with_}, not of {without}")
                continue
            expected = roles.method.statistic_shape(kind, shape)
            for (_, side), source in zip(sides, sources, strict=True):
                if (stored := side.spec(source.name)).shape != expected:
                    self.mismatches.add(
                        f"{kind} statistics of {source.name!r} are {stored} in {side.label}, expected {list(expected)}"
                    )
            found[kind] = tuple(Source(i, source.name) for (i, _), source in zip(sides, sources, strict=True))
        return found

    def _find_template(self, job: TensorJob, default: Source) -> Source:
        """Return the source of dtype and buffers: the base, if it has the tensor unquantised."""
        if job.offset is None and job.name in self.table.checkpoints[0] and job.name not in self.table.quantised(0):
            return Source(0, job.name)
        if default.name not in self.table.checkpoints[default.model]:
            raise self.table.checkpoints[default.model].missing(default.name)
        return default

    def _find_source(self, job: TensorJob, entry: Entry) -> Source:
        model, name = self.table.of(entry), self.stacking.source_name(job, entry)
        checkpoint = self.table.checkpoints[model]
        if name in checkpoint:
            return Source(model, name)
        key = (model, name)
        if key not in self._heads:
            head = self._heads[key] = find_tied_embedding(name, checkpoint)
            if head is not None:
                self.notes.append(f"{entry.label} has no {name!r}: its tied embedding {head!r} is used")
        return Source(model, self._heads[key] or name)

    def _assign_roles(self, job: TensorJob) -> Roles:
        override = find_override(self.recipe, job.name)
        key = (id(job.each), id(override))
        if key not in self._roles:
            same = lambda a, b: self.table.of(a) == self.table.of(b)  # noqa: E731
            roles = self._roles[key] = assign_roles(Scope(self.recipe, job.part, job.each, override), same)
            self.notes += roles.notes
        return self._roles[key]

    def _fits(self, job: TensorJob, sources: list[Source]) -> bool:
        specs: list[tuple[Source, TensorSpec]] = []
        for source in sources:
            checkpoint = self.table.checkpoints[source.model]
            if source.name not in checkpoint:
                self.mismatches.add_missing(job.name if job.offset is None else source.name, source.model)
                return False
            specs.append((source, checkpoint.spec(source.name)))
        if len({spec.shape for _, spec in specs}) > 1:
            self.mismatches.add_shapes(job.name, specs, inside=job.name in self.table.layout(0).places)
            return False
        return True

    def _resolve_parameters(self, roles: Roles, job: TensorJob, names: list[str]) -> dict[str, Any]:
        """Return the resolved parameters, checked by building the rule; equal parameters are one object."""
        reach = roles.resolver.reach
        place = (id(roles), None if reach == "nothing" else job.t)
        if reach != "name" and place in self._parameters_at:
            return self._parameters_at[place]
        found: dict[str, Any] = {}
        try:
            found = roles.resolver.at(job.name, names, job.t)
            key = (id(roles), json.dumps(found))
            if key not in self._parameters_of:
                self._built[id(found)] = build(roles.method, found, [entry.label for entry in roles.inputs])
                self._parameters_of[key] = found
            if reach != "name":
                self._parameters_at[place] = self._parameters_of[key]
            return self._parameters_of[key]
        except RecipeError as error:
            self._invalid.setdefault((job.each.where, str(error)), []).append(job.name)
            return found
