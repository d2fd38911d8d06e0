"""Ask one merge a few items, so that what would fail for every candidate is found before a study."""

from __future__ import annotations

import numpy as np

from merganser.errors import InputError, did_you_mean
from merganser.evolve.loading import LoadedRun
from merganser.evolve.runfile import summarize_problems
from merganser.evolve.workers import Job, check_answers, perform


def rehearse(loaded: LoadedRun) -> None:
    """Ask the merge in the middle of the space two items of every task. Nothing is stored.

    Args:
        loaded: The run file with its evaluator.

    Raises:
        InputError: If the models cannot be loaded or asked, or an objective needs a measure that no task has; all
            problems at once.

    Example:
        >>> rehearse(load("run.yml"))  # doctest: +SKIP
    """
    run, space = loaded.design, loaded.design.search_space
    middle = space.decode(np.full(len(space.variables), 0.5))
    problems: list[str] = []
    measured: dict[str, object] = {}
    for number, (name, task) in enumerate(run.tasks.items()):
        outcome = perform(loaded.evaluate, Job(number, middle, {name: [0, 1]}), "")
        try:
            if outcome.error is not None:
                raise InputError(outcome.error.splitlines()[0])
            measured |= check_answers(outcome, [name] if task.needs_irt else [])
        except InputError as error:
            problems.append(f"tasks.{name}: {error}")
    if not problems:
        wanted = dict.fromkeys(measure for objective in run.objectives for measure in objective.measures)
        missing = [measure for measure in wanted if measure not in measured]
        problems = [f"objectives: nothing measures {each!r}{did_you_mean(each, measured)}" for each in missing]
    if problems:
        raise summarize_problems(problems, loaded.source)
