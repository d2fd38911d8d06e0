"""One merge for every input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from merganser.errors import one_of
from merganser.library.library import Library
from merganser.modules.inputs import Inputs
from merganser.routing.baselines.base import Baseline
from merganser.routing.composition import applied
from merganser.routing.heads import HeadLike, HeadScore
from merganser.routing.models import Features

StaticMethod = Literal["tsv", "task_arithmetic"]


class Static(Baseline):
    """One merge for every input: TSV-Merge of the whole library, or task arithmetic θ₀ + λ ΣΔ_t.

    Args:
        module: The network. It must hold the base's weights.
        library: The experts.
        heads: The classification head of every expert, by its name.
        method: `"tsv"` or `"task_arithmetic"`.
        scale: λ; by default 1 for `tsv` and 0.3 for task arithmetic.
        features: Turns the module's output and inputs into what the heads read, shape (samples, width). Needed
            unless the output itself has this shape.
        score: How answers of different heads are compared: `"logit"`, `"probability"` or `"posterior"`.

    Example:
        >>> model = mg.routing.Static(encoder, library, heads, method="task_arithmetic")
        >>> classes = model.predict(images, "math").classes
    """

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, HeadLike],
        *,
        method: StaticMethod = "tsv",
        scale: float | None = None,
        features: Features | None = None,
        score: HeadScore = "logit",
    ) -> None:
        one_of("static method", method, StaticMethod)
        factor = (1.0 if method == "tsv" else 0.3) if scale is None else scale
        merge = {"scale": factor} if method == "tsv" else {}
        super().__init__(module, library, heads, features=features, score=score, merge=merge)
        self.method, self.scale = method, factor
        self.derive()

    def derive(self) -> None:
        if self.method == "tsv":
            made = self.composer.compose(frozenset(self.library.experts))
            self.composition = made.materialized(self.composer.tensors)
        else:
            self.composition = self.averaged(self.scale)

    def attempt(self, inputs: Inputs, task: str | None) -> tuple[Any, None]:
        with applied(self.module, self.composition):
            return inputs.run(self.module), None
