"""`merganser evolve`: run, watch and read studies."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.interrupts import explain_interrupt, explain_resume
from merganser.cli.options import DryRun, Json, Overwrite, Ray, Resume, Task
from merganser.cli.output import emit, say, say_written, wrap
from merganser.cli.progress import ProgressReporter
from merganser.units import show_time

if TYPE_CHECKING:
    from merganser.evolve.costs import Event
    from merganser.evolve.intervals import Interval
    from merganser.evolve.objectives import Objective
    from merganser.evolve.store import Trial
    from merganser.evolve.study import Study

app = typer.Typer(help="Search for a merge with few evaluations.", no_args_is_help=True)

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="File of the study.")]
ObjectiveName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Objective that decides; required if there are several.")
]


@app.command()
def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="Run file (YAML): models, space, tasks, search.")],
    study: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of the study; default: RUN with suffix .sqlite.")
    ] = None,
    resume: Resume = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Number of processes; default: that of the run file, else 1.")
    ] = None,
    ray: Ray = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run the study that a run file describes. Stop it at any time and continue with --resume.

    The winner's score is measured on items that neither the search nor the calibration used. --dry-run imports the
    Python modules that the file names and prints the plan. It then loads the models, as a search does, and asks one
    merge two questions of every task; interrupt it there if the plan is all you want.
    """
    from merganser.evolve.loading import load
    from merganser.evolve.rehearsal import rehearse
    from merganser.evolve.runs import start

    loaded = load(run_file)
    for caution in loaded.cautions:
        say(f"note: {caution}", sys.stderr)
    if dry_run:
        _describe(loaded, as_json)
        rehearse(loaded)
        if not as_json:
            say("tried     one merge answered two questions of every task")
        return
    path = study or run_file.parent / f"{run_file.stem}.sqlite"
    with explain_interrupt(lambda: explain_resume(path)), ProgressReporter("evolving", "steps") as reporter:
        listener = _Listener(reporter, as_json, loaded.design.objectives)
        opened = start(loaded, path, resume=resume, workers=workers, ray=ray, on_event=listener)
    with opened:
        _show_best(opened, None, as_json)
    if not as_json:
        say(f"merganser evolve export {path} winner.yml writes the recipe; merganser report {path} the whole result.")


@app.command()
def init(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LABEL=]CKPT", help="Models to merge; asked for if left out."),
    ] = None,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Run file to write.", show_default=False)] = Path(
        "run.yml"
    ),
    base: Annotated[
        str | None, typer.Option(metavar="CKPT", help="Checkpoint the models were fine-tuned from.")
    ] = None,
    tasks: Task = None,
    method: Annotated[str | None, typer.Option(help="Default: task_arithmetic with a base, else linear.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a commented run file. On a terminal, asks for everything that is left out."""
    from merganser.engine.directories import check_absent, check_file
    from merganser.errors import InputError
    from merganser.evaluate import tasks as questions
    from merganser.evolve import loading
    from merganser.evolve.scaffold import render_run_file

    if out.suffix not in (".yml", ".yaml"):
        raise InputError(f"{out}: give the run file to write last; its name must end in .yml")
    check_absent(out, overwrite)
    check_file(out)
    if not models and sys.stdin.isatty():
        base = base or typer.prompt("Base checkpoint (empty if there is none)", default="", show_default=False) or None
        models = _ask_for("Model to merge, LABEL=CKPT")
    if not tasks and sys.stdin.isatty():
        tasks = _ask_for("Task, [NAME=]KIND:FILE")
    named: dict[str, str] = {}
    for text in models or ():
        label, equals, path = text.partition("=")
        label, path = (label, path) if equals else (Path(text).name, text)
        if not label or not path or label in named:
            raise InputError(f"{text}: expected LABEL=CKPT, each label once")
        named[label] = path
    asked = [questions.Task.parse(text) for text in tasks or ()]
    text = render_run_file(named, asked, base=base, method=method, root=out.resolve().parent)
    loading.parse(text, out.parent, str(out))  # what cannot run is not written
    out.write_text(text, encoding="utf-8")
    say_written(out, as_json)


def _ask_for(what: str) -> list[str]:
    """Prompt for lines until an empty one and return them."""
    found: list[str] = []
    while line := str(typer.prompt(f"{what} (empty: no more)", default="", show_default=False)).strip():
        found.append(line)
    return found


@app.command()
def watch(
    study: StudyFile,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Follow a study that runs in another process."""
    from merganser.evolve.study import Study

    while True:
        opened = Study.open(study, readonly=True)
        try:
            ended = _show_status(opened, as_json)
        finally:
            opened.close()
        if once or ended:
            return
        time.sleep(every)


@app.command()
def best(study: StudyFile, objective: ObjectiveName = None, as_json: Json = False) -> None:
    """Show the best merge and its scores on unseen items.

    With several objectives, shows the Pareto front.
    """
    from merganser.evolve.study import Study

    with Study.open(study, readonly=True) as opened:
        _show_best(opened, objective, as_json)


@app.command()
def export(
    study: StudyFile,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Recipe file to write.")],
    objective: ObjectiveName = None,
    trial: Annotated[
        str | None, typer.Option(metavar="GENERATION:POSITION", help="Trial to export instead of the best.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write the winner as a recipe.

    `merganser merge` with it gives the weights that were evaluated.
    """
    from merganser.engine.directories import check_absent, check_file
    from merganser.errors import InputError
    from merganser.evolve.runs import recipe
    from merganser.evolve.study import Study
    from merganser.plain import to_yaml

    with Study.open(study, readonly=True) as opened:
        chosen = _find_trial(opened, trial) if trial else opened.best(objective)
        check_absent(out, overwrite)
        check_file(out)
        if out.exists() and out.samefile(study):
            raise InputError(f"{out}: is the study itself; choose another file")
        out.write_text(to_yaml(recipe(opened, chosen)), encoding="utf-8")
    say_written(out, as_json)


class _Listener:
    """Prints a line per trial and a bar for the phase, or JSON lines."""

    def __init__(self, reporter: ProgressReporter, as_json: bool, objectives: Sequence[Objective]) -> None:
        self._reporter = reporter
        self._json = as_json
        self._objectives = objectives

    def __call__(self, event: Event) -> None:
        known = event.forecast is not None and event.forecast.seconds == event.forecast.seconds
        left = event.forecast.seconds if event.forecast and known else None
        if self._json:
            from merganser.evolve.schema import to_document

            trial = to_document(event.trial) if event.trial else None
            emit({"event": event.phase, "done": event.done, "total": event.total, "trial": trial})
            return
        if event.phase != "done":
            words = [f"{event.phase:<9} {event.done}/{event.total}"]
            if event.trial is not None:
                words.append(self._describe(event.trial))
            if left:
                words.append(f"about {show_time(left)} left")
            self._reporter.line("  ".join(words))
        self._reporter(event.done, event.total, event.phase, left)

    def _describe(self, trial: Trial) -> str:
        """Return a trial's objectives, of an endpoint with its name; those of a full evaluation from its measures."""
        if trial.state != "done":
            return f"{trial.state}: {trial.reason}" if trial.reason else trial.state
        scores = trial.objectives
        if trial.kind != "candidate":
            known = [o for o in self._objectives if all(measure in scores for measure in o.measures)]
            scores = {o.name: o.value(scores) for o in known} or scores
        label = f"{trial.label}: " if trial.values is None else ""
        return label + _format_scores(scores) + (", stopped" if trial.stopped is not None else "")


def _describe(loaded: Any, as_json: bool) -> None:
    design = loaded.design
    facts = {
        "event": "plan",
        "variables": [variable.name for variable in design.search_space.variables],
        "trials": design.search.trials,
        "items_per_trial": sum(task.asked for task in design.tasks.values()),
        "tasks": {
            name: {
                "items": task.items,
                "pool": task.pool,
                "test": task.items - task.pool,
                "asked": task.asked,
                "extractor": task.extractor,
                "estimator": task.estimator,
            }
            for name, task in design.tasks.items()
        },
        "objectives": [objective.name for objective in design.objectives],
        "algorithm": design.search.algorithm,
        "workers": design.workers,
    }
    if as_json:
        emit(facts)
        return
    say(wrap(f"searches  {', '.join(facts['variables'])}", " " * 10))
    say(wrap(f"trials    {facts['trials']} by {facts['algorithm']}, {facts['items_per_trial']} items each", " " * 10))
    for name, task in facts["tasks"].items():
        asked = f"task      {name}: {task['pool']} items for fitness and calibration, {task['test']} for the test"
        say(wrap(asked, " " * 10))
        say(f"          {task['asked']} asked ({task['extractor']}), score by {task['estimator']}")


def _show_status(study: Study, as_json: bool) -> bool:
    """Print the state once; return true if the study is finished."""
    design = study.design
    trials = study.trials()
    forecast = study.forecast()
    valid = [trial for trial in trials if trial.valid]
    facts: dict[str, Any] = {"event": "status", "done": len(trials), "total": design.search.trials}
    facts["failed"] = sum(trial.state == "failed" for trial in trials)
    facts["best"] = {o.name: study.best(o.name).objectives[o.name] for o in design.objectives} if valid else {}
    facts["seconds_left"] = round(forecast.seconds, 1) if forecast.seconds == forecast.seconds else None
    facts["ended"] = study.ended
    facts["failure"] = study.failure
    if as_json:
        emit(facts)
    else:
        shown = _format_scores(facts["best"]) or "nothing yet"
        left = "" if facts["seconds_left"] is None else f", about {show_time(facts['seconds_left'])} left"
        state = ", ended" if study.ended else f", failed: {study.failure}" if study.failure else left
        say(f"{facts['done']}/{facts['total']} trials, {facts['failed']} failed, best: {shown}{state}")
    return study.ended or study.failure is not None


def _show_best(study: Study, objective: str | None, as_json: bool) -> None:
    from merganser.errors import MerganserError
    from merganser.evolve.ranking import nothing
    from merganser.evolve.schema import to_document
    from merganser.evolve.summary import describe_biases, describe_comparison, unseen_intervals

    single = objective is not None or len(study.design.objectives) == 1
    winners = [study.best(objective)] if single else study.pareto()
    if not winners:
        raise MerganserError(nothing(study.trials()))
    others = (*study.design.endpoints, *study.design.references)
    endpoints = {label: scores for label in others if (scores := study.test_scores(label))}
    untested = {label: error for label in others if (error := study.test_error(label)) is not None}
    objectives = [o for o in study.design.objectives if objective in (None, o.name)]
    verdicts = {o.name: said for o in objectives if (said := describe_comparison(study, o, study.best(o.name)))}
    biases = describe_biases(study)
    failed = Counter(trial.reason for trial in study.trials() if trial.state == "failed")
    if as_json:
        found = [to_document(trial) | {"test": study.test_scores(trial)} for trial in winners]
        facts = {"event": "best", "ended": study.ended, "winners": found, "endpoints": endpoints, "untested": untested}
        emit(facts | {"verdicts": verdicts, "biases": biases, "failed": dict(failed), "cost": study.cost().to_dict()})
        return
    if not study.ended:
        tried, budget = len(study.trials()), study.design.search.trials
        say(f"best so far, after {tried} of {budget} trials; resume the run for the rest")
    for trial in winners:
        say(f"trial {trial.generation}:{trial.position}  estimated {_format_scores(trial.objectives)}")
        if intervals := unseen_intervals(study, trial.label):
            say(f"  on unseen items: {_format_intervals(intervals)}")
        elif (error := study.test_error(trial)) is not None:
            say(f"  on unseen items: failed: {error}")
        for name, value in (trial.values or {}).items():
            say(f"  {name} = {value:.4g}" if isinstance(value, float) else f"  {name} = {value}")
    for label in endpoints:
        say(f"{label} alone, on unseen items: {_format_intervals(unseen_intervals(study, label))}")
    for label, error in untested.items():
        say(f"{label} alone, on unseen items: failed: {error}")
    for sentence in (*verdicts.values(), *biases.values()):
        say(sentence)
    say(f"{study.cost().describe()}.")
    for reason, count in failed.most_common(3):
        say(f"{count} of {len(study.trials())} trials failed: {reason}")


def _format_intervals(intervals: Mapping[str, Interval]) -> str:
    return ", ".join(f"{name} {interval}" for name, interval in intervals.items())


def _format_scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


def _find_trial(study: Study, place: str) -> Trial:
    from merganser.errors import InputError

    found = next((t for t in study.trials() if f"{t.generation}:{t.position}" == place), None)
    if found is None:
        raise InputError(f"--trial {place}: no such trial; expected GENERATION:POSITION, as `best` shows them")
    return found
