"""Evaluate merges of LoRA adapters on a server, which holds the base: a candidate is an adapter that it loads.

A weighted sum of LoRA updates, Σ w·s·B·A, is one adapter whose factors are theirs side by side, so what the server asks
is exactly the merge of the recipe. vLLM loads and unloads adapters while it runs (`load_lora_adapter` and
`unload_lora_adapter`, if it was started for LoRA with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from merganser.errors import InputError
from merganser.evaluate.endpoints import Server
from merganser.evaluate.questions import Examiner
from merganser.evolve.design import BASE
from merganser.evolve.measures import name_measure
from merganser.evolve.runfile import RunFile
from merganser.evolve.space import SearchParameter
from merganser.evolve.workers import Proposal

#: Kinds of tasks that need only what a server writes or how likely it finds a text.
ASKED_BY_SERVERS = ("multiple-choice", "choice", "generation", "exact-match", "judged")


@dataclass(frozen=True)
class ServedAdapters:
    """The evaluator of a study over merges of adapters.

    Args:
        server: The server, with its name of the base. It reads the adapters from the paths of this machine.
        adapters: Directories of the adapters, by label.
        examiners: The examiner of every task.
    """

    server: Server
    adapters: Mapping[str, str]
    examiners: Mapping[str, Examiner]

    def __call__(self, candidate: Proposal, items: Mapping[str, Sequence[int]]) -> dict[str, Sequence[float]]:
        answers: dict[str, Sequence[float]] = {}
        with self._load_candidate(candidate) as server:
            for task, chosen in items.items():
                for measure, values in self.examiners[task](server, chosen).items():  # type: ignore[arg-type]
                    answers[name_measure(task, measure)] = values
        return answers

    @contextmanager
    def _load_candidate(self, candidate: Proposal) -> Iterator[Server]:
        """Have the server load a candidate (an adapter by label, or a merge of all), and unload it on exit."""
        if candidate == BASE and BASE not in self.adapters:
            yield self.server
            return
        name = f"merganser-{uuid.uuid4().hex[:12]}"
        with TemporaryDirectory(prefix="merganser-") as folder:
            self.server.load_adapter(name, self._write_candidate(candidate, Path(folder, "adapter")))
            try:
                yield replace(self.server, model=name)
            finally:
                self.server.unload_adapter(name)

    def _write_candidate(self, candidate: Proposal, out: Path) -> Path:
        from merganser.library.adapter_merging import merge_adapters

        if isinstance(candidate, str):
            if candidate not in self.adapters:
                raise InputError(f"no endpoint {candidate!r}; there are {', '.join(self.adapters)}")
            return Path(self.adapters[candidate]).resolve()
        weights = [float(candidate[f"weight.{label}"]) for label in self.adapters]
        merge_adapters(list(self.adapters.values()), out, space="concat", weights=weights, dtype="float32")
        return out


def serve_adapters(run: RunFile, examiners: Mapping[str, Examiner]) -> ServedAdapters:
    """Return the evaluator of a run file whose `model.kind` is `server`.

    Raises:
        InputError: If its merges are not weighted sums of adapters, an examiner needs the model itself, or `model.path`
            is not the address of a server.
    """
    weight = run.space.get("weight", SearchParameter(0, 1))
    plain = list(run.space) == ["weight"] and weight.per == "model" and not (weight.groups or weight.split)
    fixed = run.parameters or run.overrides or run.output
    if run.method != "task_arithmetic" or not plain or weight.points != 1 or fixed:
        raise InputError(
            "a server loads weighted sums of adapters: use method: task_arithmetic, search one weight per model and "
            "nothing else, and leave out parameters, overrides and output"
        )
    for name, task in run.tasks.items():
        if task.kind not in ASKED_BY_SERVERS or task.extractor == "representation":
            known = ", ".join(ASKED_BY_SERVERS)
            raise InputError(f"tasks.{name}: a server only answers texts; use a kind of {known}, and another extractor")
    for label, path in run.models.items():
        if not Path(path, "adapter_config.json").is_file():
            raise InputError(f"{label}: {path} is not a LoRA adapter, and a server loads nothing else")
    return ServedAdapters(Server.parse(run.model.path or ""), run.models, examiners)
