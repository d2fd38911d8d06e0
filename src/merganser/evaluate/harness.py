"""Tasks of the lm-evaluation-harness (extra `lm-eval`), asked of a live `transformers` model, item by item.

The harness draws few-shot examples in the order of the items it is given, so that the prompt of an item asked alone
differs from that in a full evaluation. Here all prompts are built once, in the harness' order; a candidate is asked the
chosen ones, and its answers are those of a full evaluation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from merganser.errors import InputError, MerganserError, did_you_mean, require
from merganser.evaluate.questions import SCORE, Direction, Measures, tokenizer_at
from merganser.evaluate.records import Records

#: What a task of the harness has for its kind.
HARNESS = "lm-eval"
#: What the harness itself seeds its few-shot examples with.
FEWSHOT_SEED = 1234
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Question:
    """One document of a task with its requests to the model."""

    task: Any
    document: Mapping[str, Any]
    requests: tuple[Any, ...]


@dataclass(frozen=True)
class Harness:
    """A task, tag or group of the harness by name; the items of a group are those of its tasks, one after the other.

    `include` is a folder of your own task files. `data` replaces the task's data set: a file (.jsonl, .json, .csv,
    .parquet), or a folder with one such file per split. The score is `metric` (by default the task's first that is a
    number for every item) after `filter` (by default the task's first); its other numbers are further measures. `shots`
    defaults to the task's own; `chat` applies the tokenizer's chat template.
    """

    task: str
    tokenizer: str
    data: str | None = None
    include: str | None = None
    metric: str | None = None
    filter: str | None = None
    shots: int | None = None
    chat: bool = False
    batch: int = 16

    def __len__(self) -> int:
        return len(self.records)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def records(self) -> Records:
        """Return the documents, with the name of their `task` unless they have a field of that name."""
        return [{"task": task.task_name, **document} for task in self.tasks for document in task.eval_docs]

    @cached_property
    def directions(self) -> Mapping[str, Direction]:
        """Return which values of a metric are better, according to the tasks; for the score, if all candidates
        agree.
        """
        found: dict[str, set[bool]] = {}
        for task in self.tasks:
            for metric, higher in task.higher_is_better().items():
                if isinstance(higher, bool):
                    found.setdefault(str(metric), set()).add(higher)
        known: dict[str, Direction] = {m: "higher" if True in s else "lower" for m, s in found.items() if len(s) == 1}
        of_score = {known[self.metric]} if self.metric in known else set(known.values()) if not self.metric else set()
        known.pop(self.metric or "", None)
        return known | ({SCORE: of_score.pop()} if len(of_score) == 1 else {})

    @cached_property
    def tasks(self) -> Sequence[Any]:
        """Return the harness' tasks, with their data."""
        manager = self._find_manager()
        wanted: Any = self.task
        if self.data is not None:
            if self.task not in manager.all_subtasks:
                raise InputError(f"data: {self.task!r} is a group of tasks; give each of them its own")
            # A task in a group may differ from the registered task of its name; a task given alone may not.
            wanted = {"group": f"{self.task}, local", "task": [{"task": self.task, **self._configure_local_data()}]}
        try:
            found = manager.load([wanted])
        except (OSError, ValueError, KeyError, ConnectionError) as error:
            raise InputError(f"task {self.task!r} of the harness cannot be loaded: {error}") from error
        tasks = list(found["tasks"].values())
        for task in tasks:
            if getattr(task, "UNSAFE_CODE", False):
                raise InputError(f"task {task.task_name!r} runs code that the model writes, which is not supported")
            if self.shots is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=self.shots or 0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        return tasks

    @cached_property
    def questions(self) -> Sequence[Question]:
        """Return every item with its prompts, built in the harness' order."""
        found = []
        template = partial(_render_chat, tokenizer_at(self.tokenizer)) if self.chat else None
        for task in self.tasks:
            task.build_all_requests(
                apply_chat_template=self.chat, fewshot_as_multiturn=self.chat, chat_template=template
            )
            requests: dict[int, list[Any]] = {}
            for request in task.instances:
                requests.setdefault(request.doc_id, []).append(request)
            for number, document in enumerate(task.eval_docs):
                found.append(Question(task, document, tuple(sorted(requests[number], key=lambda r: r.idx))))
        return found

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        asked = [_clear_answers(self.questions[item]) for item in items]
        _fill_in_replies(self._wrap_model(model), [request for question in asked for request in question.requests])
        for task in self.tasks:
            task._instances = [r for question in asked if question.task is task for r in question.requests]
            if task.instances:
                task.apply_filters()
        return self._measures([self._results(question) for question in asked])

    def _find_manager(self) -> Any:
        """Return the task manager; reads the index of the harness' tasks, which takes seconds, only if the folder
        lacks the task.
        """
        if self.include is not None:
            if not Path(self.include).is_dir():
                raise InputError(f"include: {self.include} is not a folder of task files")
            local = _load_index(self.include, False)
            if self.task in local.all_tasks:
                return local
        manager = _load_index(self.include, True)
        if self.task not in manager.all_tasks:
            raise InputError(f"the harness has no task {self.task!r}{did_you_mean(self.task, manager.all_tasks)}")
        return manager

    def _configure_local_data(self) -> dict[str, Any]:
        """Return the changes of a task's configuration that make it read `data`."""
        source = Path(str(self.data))
        files = sorted(p for p in source.iterdir() if p.suffix in BUILDERS) if source.is_dir() else [source]
        if not files or not all(p.is_file() and p.suffix in BUILDERS for p in files):
            raise InputError(f"data: {source} is not a file or folder of {', '.join(BUILDERS)}")
        if len(kinds := {BUILDERS[p.suffix] for p in files}) > 1:
            raise InputError(f"data: the files of {source} are of several kinds: {', '.join(sorted(kinds))}")
        changed: dict[str, Any] = {"dataset_path": kinds.pop(), "dataset_name": None}
        if source.is_dir():
            return changed | {"dataset_kwargs": {"data_files": {p.stem: str(p) for p in files}}}
        if self.shots:
            raise InputError(f"data: one file has no examples for {self.shots} shots; give a folder of splits")
        splits = dict.fromkeys(("training_split", "validation_split", "fewshot_split")) | {"test_split": "test"}
        return changed | splits | {"dataset_kwargs": {"data_files": {"test": str(source)}}}

    def _wrap_model(self, model: nn.Module) -> Any:
        huggingface = require("lm_eval.models.huggingface", "lm-eval")
        logging.getLogger(huggingface.__name__).addFilter(_is_worth_saying)
        return huggingface.HFLM(pretrained=model, tokenizer=tokenizer_at(self.tokenizer), batch_size=self.batch)

    def _results(self, question: Question) -> Mapping[str, Any]:
        filters = list(question.requests[0].filtered_resps)
        chosen = self.filter or filters[0]
        if chosen not in filters:
            raise InputError(f"task {self.task!r} has no filter {chosen!r}{did_you_mean(chosen, filters)}")
        replies = [request.filtered_resps[chosen] for request in question.requests]
        results: Mapping[str, Any] = question.task.process_results(question.document, replies)
        return results

    def _measures(self, results: Sequence[Mapping[str, Any]]) -> Measures:
        names = [name for name in results[0] if all(_is_number(each.get(name)) for each in results)]
        score = self.metric or next(iter(names), "")
        if score not in names:
            known = ", ".join(names) or "none"
            raise InputError(
                f"task {self.task!r} has no metric {score!r} that is a number for every item"
                f"{did_you_mean(score, names)}; there are: {known}"
            )
        columns = {name: [float(each[name]) for each in results] for name in names}
        return {SCORE: columns.pop(score), **columns}


@lru_cache(maxsize=4)
def _load_index(include: str | None, defaults: bool) -> Any:
    return require("lm_eval.tasks", "lm-eval").TaskManager(include_path=include, include_defaults=defaults)


def _render_chat(tokenizer: Any, history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """Return a conversation in the tokenizer's template, open for a reply or for the rest of its last turn."""
    text: str = tokenizer.apply_chat_template(
        list(history),
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )
    return text


def _clear_answers(question: Question) -> Question:
    """Return the same question, unanswered."""
    return replace(question, requests=tuple(replace(r, resps=[], filtered_resps={}) for r in question.requests))


def _fill_in_replies(lm: Any, requests: Sequence[Any]) -> None:
    """Send the model all requests of each kind at once; the replies are stored in the requests."""
    kinds: dict[str, list[Any]] = {}
    for request in requests:
        kinds.setdefault(request.request_type, []).extend([request] * request.repeats)
    for kind, group in kinds.items():
        for request, reply in zip(group, getattr(lm, kind)(group, disable_tqdm=True), strict=True):
            value = reply[0] if isinstance(reply, tuple) else reply
            if isinstance(value, float) and math.isnan(value):
                raise MerganserError("the merged model's log-likelihoods are not numbers")
            request.resps.append(reply)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.number, np.bool_))


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Drop the warning that the harness prints for every model that is already in memory."""
    return "`pretrained` model kwarg is not of type `str`" not in record.getMessage()
