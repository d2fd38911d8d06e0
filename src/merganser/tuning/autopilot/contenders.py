"""The contenders of a race: ways to merge, and single models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from merganser.errors import InputError
from merganser.methods.registry import lookup, parameters, registry
from merganser.tuning.autopilot.looking import SUSPECT, Remark

PLAIN = "task_arithmetic"
#: Methods that are proposed if registered, the simplest first.
METHODS = (PLAIN, "ties", "tsv", "iso_c", "iso_cts", "wudi", "ace")
#: Initial scales of a race, which closes in on the best ones. Those of a plain sum are per expert.
SCALES = (0.5, 1.0, 2.0)
SHARES = (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Contender:
    """A method with its parameters and experts; without a method, a single model.

    Attributes:
        name: The model, or the method.
        experts: Names of the experts that are merged.
        parameters: Parameters of the method, with its scale.
        without: Names of experts that are left out although they could be merged.
    """

    name: str
    experts: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def is_merge(self) -> bool:
        return bool(self.experts)

    @property
    def scale(self) -> float:
        return float(self.parameters["scale"])

    @property
    def label(self) -> str:
        """The unique name in results."""
        values = "".join(f" {name}={_short(value)}" for name, value in self.parameters.items())
        return self.name + values + (f" without {', '.join(self.without)}" if self.without else "")

    def at(self, scale: float) -> Contender:
        """Return the same merge at another scale, rounded to three digits."""
        return replace(self, parameters={**self.parameters, "scale": float(f"{scale:.3g}")})


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def without(experts: Sequence[str], remarks: Sequence[Remark], kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the experts that are not the subject of remarks of these kinds, in order."""
    out = {remark.experts[0] for remark in remarks if remark.kind in kinds}
    return tuple(name for name in experts if name not in out)


def propose(experts: Sequence[str], remarks: Sequence[Remark], methods: Sequence[str] | None = None) -> list[Contender]:
    """Return the initial merges of a race: methods × scales.

    Experts that may spoil a merge (of another base, or far too long) are tried with and without. If lengths differ and
    a method can equalise them (`norms`), that is tried at the middle scale.

    Args:
        experts: The experts that can be merged, two or more.
        remarks: The findings about them.
        methods: The methods; by default those of `METHODS` that are registered.

    Raises:
        InputError: If a method is unknown, has no scale, or does not use task vectors.
    """
    known = registry()
    named = list(methods) if methods else [name for name in METHODS if name in known]
    kinds = {remark.kind for remark in remarks}
    sound = without(experts, remarks, SUSPECT)
    suspects = tuple(name for name in experts if name not in sound)
    sets = [(tuple(experts), ()), *([(sound, suspects)] if suspects and len(sound) > 1 else [])]
    found: dict[str, Contender] = {}
    for name in dict.fromkeys(named):
        declared = parameters(lookup(name))
        if "scale" not in declared or lookup(name).base != "required":
            raise InputError(f"method {name!r} cannot take part in a race: it needs a base and a scale")
        equal = "norms" in declared and bool(kinds & {"long", "norms"})
        for own, left in sets:
            scales = [share / len(own) for share in SHARES] if name == PLAIN else SCALES
            merges = [Contender(name, own, {}, left).at(scale) for scale in scales]
            if equal:  # only once: the race tries other scales
                merges.append(Contender(name, own, {"norms": "equal"}, left).at(scales[1]))
            found |= {contender.label: contender for contender in merges}
    return list(found.values())
