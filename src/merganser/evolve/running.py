"""Run a study in one process: calibrate, search by replaying ask and tell, score the winners on the test items."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from merganser.errors import InputError, MerganserError, did_you_mean
from merganser.evolve.arrays import Array
from merganser.evolve.costs import Event, forecast
from merganser.evolve.design import Design
from merganser.evolve.measures import task_of
from merganser.evolve.preparation import Calibration, Prepared, check, prepare, read_prepared, split, to_bytes
from merganser.evolve.racing import Race, choose_incumbents, estimate_stopped, race_against, race_order
from merganser.evolve.ranking import (
    COPIED,
    best,
    choose_reranked,
    find_common_failure,
    find_reranked_front,
    nothing,
    pareto,
    spread,
    top,
)
from merganser.evolve.recall import count_answers, mean_scores, missing_items, recall
from merganser.evolve.searchers import searcher
from merganser.evolve.space import key
from merganser.evolve.store import Answers, Store, Trial, TrialEstimate
from merganser.evolve.workers import Evaluate, Job, Outcome, Proposal, Workers, check_answers, workers

TrialKind: TypeAlias = Literal["endpoint", "test", "full", "quantized"]
Listener = Callable[[Event], None]
#: Objectives, and the estimates behind them.
TestScores: TypeAlias = tuple[dict[str, float], dict[str, TrialEstimate]]
#: Maximum number of candidates drawn, as a multiple of the trials, including those outside the constraints.
MAX_DRAWS = 20


class StudyRun:
    """The work of one process on a study."""

    def __init__(
        self,
        store: Store,
        design: Design,
        evaluate: Evaluate,
        calibration: Mapping[str, Calibration] | None,
        count: int,
        ray: str | None,
        on_event: Listener | None,
    ) -> None:
        self.store, self.design = store, design
        self.calibration = calibration = calibration or {}
        self.on_event = on_event or (lambda event: None)
        for name in calibration:
            if name not in design.tasks:
                raise InputError(f"calibration of {name!r}, which is not a task{did_you_mean(name, design.tasks)}")
        for name, task in design.tasks.items():
            if not store.artifact(f"prepared/{name}"):
                check(name, task, calibration.get(name, Calibration()))
        self.workers: Workers = workers(evaluate, count, ray=ray)
        self.count = count
        self.quantized = getattr(evaluate, "quantize", None) is not None
        self.tasks: dict[str, Prepared] = {}
        self.known: dict[str, Trial] = {}

    def close(self) -> None:
        self.workers.close()

    # -- before the search

    def prepare(self) -> None:
        design = self.design
        self.store.set(workers=self.count)
        search = design.search
        if not all(self.store.artifact(f"prepared/{name}") for name in design.tasks):
            endpoints = self._gather_endpoint_answers()
            began = time.perf_counter()
            for name, task in design.tasks.items():
                known, answers = self.calibration.get(name), endpoints.get(name)
                prepared = prepare(name, task, search.seed, answers, known, split_seed=search.split_seed)
                self.store.keep(f"prepared/{name}", to_bytes(prepared))
            fitting = {"fitting": {"seconds": time.perf_counter() - began}}
            self.store.set(costs={**self.store.costs(), **fitting})
        self.tasks = read_prepared(self.store, design.tasks)
        done = sum(trial.state != "infeasible" for trial in self.store.trials("candidate"))
        self.on_event(Event("search", done, search.trials, forecast=forecast(self.store, self.design)))

    def _gather_endpoint_answers(self) -> dict[str, dict[str, Array]]:
        """Return answers of every endpoint to the pools of tasks that need an IRT: {task: {endpoint: answers}}."""
        seed, tasks = self.design.search.split_seed, self.design.tasks
        items = {name: split(name, task, seed).pool.tolist() for name, task in tasks.items() if task.needs_irt}
        if not items:
            return {}
        self._evaluate("endpoint", self.design.endpoints, items, "calibrate")
        found: dict[str, dict[str, Array]] = {name: {} for name in items}
        for label in self.design.endpoints:
            trial = self._done("endpoint", label)
            if trial is None:
                failed = self.store.trials("endpoint", label)[-1]
                raise MerganserError(f"endpoint {label!r} could not be evaluated: {failed.reason}")
            for name, answers in self.store.answers(trial).items():
                if name in found:
                    found[name][label] = answers.values
        return found

    # -- the search

    def search(self) -> None:
        design, budget = self.design, self.design.search.trials
        self._forget_failure()
        replayed = {(t.generation, t.position): t for t in self.store.trials("candidate")}
        self.known = {t.label: t for t in reversed(replayed.values()) if t.state == "done" and t.cached_from is None}
        running = searcher(design.search.algorithm, design.problem)
        worst = np.full(len(design.objectives), -np.inf)
        span = np.zeros(len(design.objectives))
        count, generation, drawn = 0, 0, 0
        while count < budget and drawn < MAX_DRAWS * budget and len(genomes := running.ask()):
            asked = len(genomes)
            genomes = self._select_affordable(genomes, budget - count)
            trials = self._generation(generation, genomes, replayed)
            if reason := find_common_failure(trials):
                raise MerganserError(
                    f"every candidate of generation {generation} failed for the same reason: {reason}; fix it "
                    "and resume"
                )
            count += sum(trial.state != "infeasible" for trial in trials)
            drawn += len(trials)
            if len(trials) < asked:  # the budget ends in the middle of a generation
                break
            fitness = np.array([self._fitness(trial) for trial in trials])
            finite = fitness[np.isfinite(fitness).all(1)]
            if len(finite):
                worst = np.maximum(worst, finite.max(0))
                span = np.maximum(span, worst - finite.min(0))
            # Candidates without a fitness (failed, infeasible) rank last, with a finite value, since algorithms compute
            # sums.
            penalty = np.where(np.isfinite(worst), worst, 0.0) + np.where(span > 0, span, 1.0)
            fitness = np.where(np.isfinite(fitness), fitness, penalty)
            violations = np.array([trial.violations for trial in trials], dtype=np.float64)
            running.tell(fitness, violations.reshape(len(trials), -1))
            generation += 1

    def _select_affordable(self, genomes: Array, left: int) -> Array:
        """Return the first genomes of a generation, as many as trials are left; those outside the constraints are
        not evaluated and do not count.
        """
        space = self.design.search_space
        feasible = [bool((space.violations(space.decode(genome)) <= 0).all()) for genome in genomes]
        return genomes[np.cumsum(feasible) <= left]

    def _forget_failure(self) -> None:
        """Restart from the first generation that failed for one reason, or from the beginning if all trials failed:
        the cause may be gone. Failed trials among good ones are kept, since later generations depend on them.
        """
        trials = self.store.trials("candidate")
        generations: dict[int, list[Trial]] = {}
        for trial in trials:
            generations.setdefault(trial.generation or 0, []).append(trial)
        alike = next((number for number, members in sorted(generations.items()) if find_common_failure(members)), None)
        if any(t.state == "failed" for t in trials) and not any(t.state == "done" for t in trials):
            alike = 0
        if alike is not None:
            self.store.forget("candidate", alike)

    def _generation(
        self, generation: int, genomes: Array, replayed: dict[tuple[int | None, int | None], Trial]
    ) -> list[Trial]:
        """Return the trials of one generation, from the store if it has them."""
        fresh: list[Trial] = []
        for position, genome in enumerate(genomes):
            values = self.design.search_space.decode(genome)
            blank = Trial(
                "candidate",
                key(values),
                "done",
                generation,
                position,
                tuple(map(float, genome)),
                values,
                violations=tuple(map(float, self.design.search_space.violations(values))),
            )
            have = replayed.get((generation, position))
            if have is None:
                fresh.append(blank)
            elif have.label != blank.label:
                raise MerganserError(
                    f"{self.store.path}: trial {position} of generation {generation} does not replay (it was made with "
                    "another version of the search library); start a new study"
                )
        head = max(1, len(self.design.starts)) if self.design.search.race and generation == 0 else 0
        for wave in ([t for t in fresh if (t.position or 0) < head], [t for t in fresh if (t.position or 0) >= head]):
            earlier = [t for t in replayed.values() if (t.generation or 0) < generation or (t.position or 0) < head]
            for trial in self._evaluate_trials(wave, choose_incumbents(earlier, self.design.objectives)):
                replayed[trial.generation, trial.position] = trial
                done = sum(t.state != "infeasible" for t in replayed.values())
                self.on_event(
                    Event("search", done, self.design.search.trials, trial, forecast(self.store, self.design))
                )
        return [replayed[generation, position] for position in range(len(genomes))]

    def _race(self, incumbents: Sequence[Trial], items: Mapping[str, Sequence[int]]) -> Race | None:
        if not self.design.search.race or not incumbents:
            return None
        rivals = [self.store.answers(trial) for trial in incumbents]
        return race_against(rivals, items, self.design.search.race, self.design.objectives)

    def _evaluate_trials(self, trials: Sequence[Trial], incumbents: Sequence[Trial]) -> Iterable[Trial]:
        """Evaluate trials; with `search.race` only until they are almost certainly worse than an incumbent."""
        items = {name: prepared.items for name, prepared in self.tasks.items()}
        if self.design.search.race:
            order = {name: race_order(prepared, name, self.design.search.seed) for name, prepared in self.tasks.items()}
            items = {name: [chosen[place] for place in order[name]] for name, chosen in items.items()}
        race = self._race(incumbents, items)
        jobs: list[Job] = []
        copies: list[Trial] = []
        asked: set[str] = set()
        for number, trial in enumerate(trials):
            if any(v > 0 for v in trial.violations):
                yield self.store.add(replace(trial, state="infeasible", finished=time.time()), {})
            elif trial.label in self.known or trial.label in asked:
                copies.append(trial)
            else:
                asked.add(trial.label)
                assert trial.values is not None
                jobs.append(Job(number, trial.values, items, race=race))
        for outcome in self.workers.run(jobs):
            if outcome.lost is None:
                ended = self._record_end(trials[outcome.job.number], outcome, self._estimate)
            else:
                rival = incumbents[outcome.lost]
                stopped = replace(trials[outcome.job.number], stopped=rival.id)
                ended = self._record_end(stopped, outcome, partial(self._estimate_stopped, rival))
            if ended.state == "done":
                self.known[ended.label] = ended
            yield ended
        for trial in copies:
            source = self.known.get(trial.label)
            if source is None:
                failed = replace(trial, state="failed", error=COPIED)
                yield self.store.add(replace(failed, finished=time.time()), {})
                continue
            same = replace(trial, objectives=source.objectives, estimates=source.estimates, stopped=source.stopped)
            yield self.store.add(replace(same, cached_from=source.id, finished=time.time()), {})

    def _fitness(self, trial: Trial) -> list[float]:
        if not trial.valid:
            return [np.inf] * len(self.design.objectives)
        return [-o.sign * trial.objectives[o.name] for o in self.design.objectives]

    def _estimate(self, answers: Mapping[str, Answers]) -> TestScores:
        """Return objectives, and the estimates behind them, from the answers to the subsets.

        A measure that this evaluator does not report would be missing for every candidate, so the search ends.
        """
        for objective in self.design.objectives:
            for measure in objective.measures:
                if measure not in answers:
                    hint = did_you_mean(measure, answers)
                    raise MerganserError(f"objective {objective.name!r}: the evaluator reports no {measure!r}{hint}")
        estimates: dict[str, TrialEstimate] = {}
        for measure, found in answers.items():
            task = self.tasks[task_of(measure)]
            if measure in self.tasks:
                made = task.estimator(found.values, task.subset)
                error = made.error if made.error is not None and np.isfinite(made.error) else None
                mixture = None if made.mixture is None else tuple(made.mixture.tolist())
                estimates[measure] = TrialEstimate(made.value, error, mixture)
            else:
                estimates[measure] = TrialEstimate(float(task.subset.weights @ found.values))
        return self._objectives(estimates), estimates

    def _objectives(self, estimates: Mapping[str, TrialEstimate]) -> dict[str, float]:
        scores = {measure: estimate.value for measure, estimate in estimates.items()}
        return {objective.name: objective.value(scores) for objective in self.design.objectives}

    def _estimate_stopped(self, rival: Trial, answers: Mapping[str, Answers]) -> TestScores:
        """Return the same for a stopped candidate, from its difference to its rival."""
        estimates = estimate_stopped(answers, rival, self.store.answers(rival), self.tasks)
        return self._objectives(estimates), estimates

    # -- after the search

    def conclude(self) -> None:
        """Score the winner (or the Pareto set) and the endpoints on test items; fully evaluate candidates for the
        estimator.
        """
        valid = [trial for trial in self.store.trials("candidate") if trial.valid]
        if not valid:
            raise MerganserError(nothing(self.store.trials("candidate")))
        test = {name: prepared.split.test.tolist() for name, prepared in self.tasks.items()}
        pool = {name: prepared.split.pool.tolist() for name, prepared in self.tasks.items()}
        if self.design.search.stability:
            chosen = spread(valid, self.design.objectives[0], self.design.search.stability)
            self._evaluate("full", [t.values or {} for t in chosen], pool, "stability")
        winners = [t.values or {} for t in self._select_winners(valid, pool)]
        self._evaluate("test", [*winners, *self.design.endpoints, *self.design.references], test, "test")
        if self.quantized:
            self._evaluate("quantized", self.design.endpoints, test, "test")
        self.store.set(ended=True)
        self.on_event(Event("done", self.design.search.trials, self.design.search.trials))

    def _select_winners(self, valid: Sequence[Trial], pool: Mapping[str, Sequence[int]]) -> list[Trial]:
        """Return the best trial, or the Pareto set of several objectives, after evaluating the first few on the
        pool.
        """
        objectives = self.design.objectives
        few = any(len(task.items) < len(pool[name]) for name, task in self.tasks.items())
        if len(objectives) > 1:
            front = pareto(valid, objectives)
            if self.design.search.rerank and few:
                chosen = spread(front, self.design.objectives[0], self.design.search.rerank * len(objectives))
                self._evaluate("full", [trial.values or {} for trial in chosen], pool, "rerank")
                return find_reranked_front(valid, self.store.trials("full"), objectives) or front
            return front
        if self.design.search.rerank and few:
            finalists = top(valid, objectives[0], self.design.search.rerank)
            self._evaluate("full", [trial.values or {} for trial in finalists], pool, "rerank")
            if found := choose_reranked(valid, self.store.trials("full"), objectives[0]):
                return [found]
        return [best(valid, objectives)]

    def _evaluate(
        self, kind: TrialKind, candidates: Sequence[Proposal], items: Mapping[str, Sequence[int]], phase: str
    ) -> None:
        """Evaluate and record the `candidates` that the store does not have; the score of a measure is its mean. A
        full evaluation asks only the items that the search did not.
        """
        labels = [each if isinstance(each, str) else key(each) for each in candidates]
        waiting = [(label, each) for label, each in zip(labels, candidates, strict=True) if not self._done(kind, label)]
        exact = kind == "test"  # winners are used, and compared with endpoints, in full precision
        known = [self.store.answers(self.known[label]) if kind == "full" else {} for label, _ in waiting]
        asked = [missing_items(items, have) for have in known]
        jobs = [Job(number, each, asked[number], exact=exact) for number, (_, each) in enumerate(waiting)]
        for done, outcome in enumerate(self.workers.run(jobs), 1):
            label, candidate = waiting[outcome.job.number]
            have, values = known[outcome.job.number], None if isinstance(candidate, str) else candidate
            blank = Trial(kind, label, "done", values=values, recalled=count_answers(have))
            trial = self._record_end(blank, recall(outcome, have), mean_scores)
            self.on_event(Event(phase, done, len(jobs), trial, forecast(self.store, self.design)))

    def _done(self, kind: str, label: str) -> Trial | None:
        return next((t for t in self.store.trials(kind, label) if t.state == "done"), None)

    def _record_end(
        self, trial: Trial, outcome: Outcome, score: Callable[[Mapping[str, Answers]], TestScores]
    ) -> Trial:
        """Record an outcome: the trial with its scores, or its failure with the reason."""
        attempts, now = outcome.job.attempt, time.time()
        ran = replace(trial, seconds=outcome.seconds, worker=outcome.worker, attempts=attempts, finished=now)
        if outcome.answers is None:
            return self.store.add(replace(ran, state="failed", error=outcome.error), {}, outcome.costs)
        try:
            answers = check_answers(outcome, [name for name, task in self.design.tasks.items() if task.needs_irt])
            objectives, estimates = score(answers)
        except InputError as error:
            return self.store.add(replace(ran, state="failed", error=str(error)), {}, outcome.costs)
        return self.store.add(replace(ran, objectives=objectives, estimates=estimates), answers, outcome.costs)
