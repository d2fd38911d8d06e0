"""`evaluate`: compare a merged checkpoint with its parents, from its bytes to its answers."""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.dequantised import Dequantised
from merganser.checkpoints.directory import Directory
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.origin import LOCK_FILE
from merganser.errors import InputError, MerganserError, require
from merganser.evaluate import language
from merganser.evaluate.accuracy import normalized_accuracy
from merganser.evaluate.endpoints import Server
from merganser.evaluate.tasks import Task
from merganser.evaluate.verdicts import Check, Verdict, verdict
from merganser.evaluate.weights import check_weights
from merganser.notebooks import Shown
from merganser.origin.lock_file import read_lock


@dataclass(frozen=True)
class Scores:
    """The scores of one model: perplexity on the built-in texts, if it is a language model, and tasks."""

    perplexity: float | None = None
    tasks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation(Shown):
    """The checks of a model, and its scores beside those of its parents.

    Attributes:
        path: The model.
        verdict: `"sound"`, `"doubtful"` or `"broken"`.
        checks: The checks.
        scores: The scores of the model.
        parents: The scores of its parents.
        normalized: Normalised accuracy over the tasks; the expert of a task is the parent with the best score.
        questions: The number of questions of each task, as far as scores are means over them.

    Example:
        >>> mg.evaluate.evaluate("math").verdict
    """

    path: str
    verdict: Verdict
    checks: tuple[Check, ...]
    scores: Scores
    parents: dict[str, Scores]
    normalized: float | None
    questions: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    checkpoint: str | os.PathLike[str],
    parents: Sequence[str | os.PathLike[str]] | None = None,
    tasks: Sequence[Task] = (),
    *,
    limit: int | None = None,
    device: str = "cpu",
    on_step: Callable[[str], None] = lambda step: None,
) -> Evaluation:
    """Check and score a model, and score its parents for comparison, one in memory at a time.

    The questions of every task are checked before a model is loaded. A model that transformers cannot load is judged by
    its weights alone.

    Args:
        checkpoint: The model.
        parents: Models to compare it with. By default those that its lock file says it was merged from, as far as
            they lie in directories here.
        tasks: Questions to ask.
        limit: Maximum questions per task, drawn in proportion to their labels.
        device: The torch device.
        on_step: Called with the current step.

    Returns:
        The checks, the scores and a verdict.

    Raises:
        InputError: If a task file is damaged, a model does not exist, or is of a kind that a task cannot ask.

    Example:
        >>> mg.evaluate.evaluate("math").verdict
    """
    if len({task.name for task in tasks}) < len(tasks):
        raise InputError("two tasks have the same name; write name=kind:file")
    for task in tasks:
        task.check()
    if str(checkpoint).startswith(("http://", "https://")) and "#" in str(checkpoint):
        return _evaluate_servers(str(checkpoint), parents or (), tasks, limit, on_step)
    opened = open_checkpoint(checkpoint)
    if parents is None:
        parents = find_recorded_parents(opened.directory)
        if parents:
            on_step(f"parents by its lock file: {', '.join(map(str, parents))}")
    on_step(f"weights of {opened.label}")
    checks = [check_weights(opened)]
    # A view over a directory (an adapter, a file of it) is not what transformers would load from it.
    kind = language.kind_of_model(opened.directory) if _is_directory(opened) else None
    own, others = Scores(), {}
    if kind is None:
        if tasks:
            raise InputError(
                f"{opened.label}: tasks need a model that transformers can load, but it has no such config.json"
            )
        unscored = "; neither it nor its parents are scored" if parents else ""
        checks.append(Check("loads", "skip", f"not a transformers model: no config.json with a model_type{unscored}"))
    elif checks[0].status != "fail":
        for task in tasks:
            task.check_model(opened.label, kind)
        examine = functools.partial(_examine, kind=kind, tasks=tasks, limit=limit, device=device, on_step=on_step)
        found = {parent.label: examine(parent) for parent in map(open_checkpoint, parents)}
        others = {label: parent.scores for label, parent in found.items()}
        try:
            mine = examine(opened)
            own = mine.scores
            checks += [*mine.checks, *_compare_language(mine, found)]
        except InputError:  # errors that the user can correct are not the model's
            raise
        except MerganserError as error:
            checks.append(Check("loads", "fail", str(error)))
        checks += compare_tasks(tasks, own, others, limit)
    normalized = _normalize_scores(tasks, own, list(others.values()))
    asked = count_questions(tasks, limit) if own.tasks else {}
    return Evaluation(str(checkpoint), verdict(checks), tuple(checks), own, others, normalized, asked)


def count_questions(tasks: Sequence[Task], limit: int | None) -> dict[str, int]:
    """Return how many questions of each task are asked; tasks that are not a mean over questions are left out."""
    return {task.name: min(limit or sys.maxsize, task.count("")) for task in tasks if task.higher_is_better}


def find_recorded_parents(directory: Path | None) -> list[str]:
    """Return the models that a directory was merged from, by its lock file, as far as they lie in directories here."""
    if directory is None or not (directory / LOCK_FILE).is_file():
        return []
    places = [each.label for each in read_lock(directory).models if each.kind in ("model", "merge")]
    return [place for place in dict.fromkeys(places) if (Path(place).expanduser() / "config.json").is_file()]


def compare_tasks(
    tasks: Sequence[Task], own: Scores, others: Mapping[str, Scores], limit: int | None
) -> Iterator[Check]:
    """Yield a check of every task: a warning if the model is clearly worse than its worst parent.

    It is if the difference exceeds two standard errors, with one right and one wrong answer added to both scores.
    """
    for task in tasks if others and own.tasks else ():
        scores = {label: found.tasks[task.name] for label, found in others.items()}
        if not task.higher_is_better or not all(0 <= score <= 1 for score in (own.tasks[task.name], *scores.values())):
            continue
        mine, (label, worst) = own.tasks[task.name], min(scores.items(), key=lambda item: item[1])
        count = count_questions([task], limit)[task.name]
        shares = [(score * count + 1) / (count + 2) for score in (mine, worst)]
        error = math.sqrt(math.fsum(share * (1 - share) for share in shares) / (count + 2))
        if shares[0] < shares[1] - 2 * error:
            said = f"{mine:.3f}, clearly below its worst parent, {label} ({worst:.3f}; {count} questions)"
            yield Check(task.name, "warn", said)
        else:
            yield Check(task.name, "pass", f"{mine:.3f}; its parents have {worst:.3f} to {max(scores.values()):.3f}")


def _is_directory(checkpoint: Checkpoint) -> bool:
    """Return whether transformers can load a checkpoint from its directory; it decodes quantised ones itself."""
    stored = checkpoint.source if isinstance(checkpoint, Dequantised) else checkpoint
    return isinstance(stored, Directory)


def _evaluate_servers(
    checkpoint: str,
    parents: Sequence[str | os.PathLike[str]],
    tasks: Sequence[Task],
    limit: int | None,
    on_step: Callable[[str], None],
) -> Evaluation:
    """Evaluate models behind servers, by their answers only."""
    if not tasks:
        raise InputError(f"{checkpoint}: a model behind a server is judged by its answers alone; give tasks")
    found = {}
    for each in (checkpoint, *map(str, parents)):
        server = Server.parse(each)
        on_step(f"tasks of {each}")
        found[each] = Scores(None, {task.name: task.score(server, "", limit) for task in tasks})
    checks = (Check("weights", "skip", "behind a server: judged by its answers alone"),)
    own = found.pop(checkpoint)
    normalized, asked = _normalize_scores(tasks, own, list(found.values())), count_questions(tasks, limit)
    return Evaluation(checkpoint, verdict(checks), checks, own, found, normalized, asked)


@dataclass(frozen=True)
class _Examined:
    scores: Scores
    checks: list[Check]
    tokenizer: Any


def _examine(
    checkpoint: Checkpoint,
    *,
    kind: str,
    tasks: Sequence[Task],
    limit: int | None,
    device: str,
    on_step: Callable[[str], None],
) -> _Examined:
    """Load one model, run all checks and tasks, and release it."""
    directory = checkpoint.directory
    if not _is_directory(checkpoint) or directory is None:
        raise InputError(f"{checkpoint.label}: not a model directory; write it out as one first")
    on_step(f"loading {checkpoint.label}")
    loaded = language.load(directory, kind, device)
    checks, found = [loaded.check], None
    tokenizer = _tokenizer(directory)
    if tokenizer is None:
        finding = "no tokenizer files next to the weights, so no text was tried"
        checks.append(Check("tokenizer", "warn" if kind == "causal-lm" else "skip", finding))
    else:
        checks += [language.check_vocabulary(loaded.module, tokenizer), language.check_outputs(loaded, tokenizer)]
        if kind == "causal-lm":
            checks.append(language.check_end_token(loaded.module, tokenizer))
            if checks[-2].status == "pass":
                on_step(f"perplexity of {checkpoint.label}")
                found = language.perplexity(loaded.module, directory)
    scores = {}
    for task in tasks:
        on_step(f"{task.name} of {checkpoint.label}")
        scores[task.name] = task.score(loaded.module, str(directory), limit)
    del loaded
    gc.collect()
    return _Examined(Scores(found, scores), checks, tokenizer)


def _compare_language(own: _Examined, parents: Mapping[str, _Examined]) -> list[Check]:
    """Return the checks of a language model that compare it with its parents."""
    perplexity, tokenizer = own.scores.perplexity, own.tokenizer
    if perplexity is None:
        return []
    known = {label: value for label, each in parents.items() if (value := each.scores.perplexity) is not None}
    unigram = language.unigram_perplexity(tokenizer)
    chats = any(each.tokenizer is not None and each.tokenizer.chat_template for each in parents.values())
    return [
        language.check_perplexity(perplexity, known, len(tokenizer), unigram),
        language.check_chat_template(tokenizer, chats),
    ]


def _normalize_scores(tasks: Sequence[Task], own: Scores, others: Sequence[Scores]) -> float | None:
    names = [task.name for task in tasks if task.higher_is_better and task.name in own.tasks]
    best = {name: max((scores.tasks[name] for scores in others), default=0.0) for name in names}
    merged = {name: own.tasks[name] for name in names if best[name] > 0}
    return normalized_accuracy(merged, best) if merged else None


def _tokenizer(directory: Path | None) -> Any:
    if directory is None or not any(directory.glob("tokenizer*")):
        return None
    try:
        return require("transformers", "hf").AutoTokenizer.from_pretrained(str(directory))
    except InputError:
        raise
    except Exception as error:  # tokenizers raise many kinds of errors
        reason = (str(error).strip().splitlines() or [""])[0]
        raise MerganserError(
            f"{directory}: its tokenizer cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
