"""Names of measures: a task's score has the task's name, its other measures are `task.measure`."""

from __future__ import annotations

from merganser.evaluate.questions import SCORE


def name_measure(task: str, measure: str) -> str:
    """Return the name in answers and objectives of what an examiner measures.

    Example:
        >>> name_measure("quiz", "score"), name_measure("quiz", "soft")
        ('quiz', 'quiz.soft')
    """
    return task if measure == SCORE else f"{task}.{measure}"


def task_of(measure: str) -> str:
    """Return the task of a measure; the names of tasks have no dots.

    Example:
        >>> task_of("quiz.soft")
        'quiz'
    """
    return measure.partition(".")[0]
