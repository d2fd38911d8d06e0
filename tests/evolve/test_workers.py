"""Workers: every job has one outcome, whatever becomes of it; Ray gives the same as this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from synthetic_world import Deadly, World

from merganser.errors import InputError
from merganser.evolve.workers import ATTEMPTS, Job, workers
from support.ray_runs import run_with_ray

JOBS = [Job(i, {"weight.math": 0.2 * i, "weight.code": 1.0}, {"quiz": [1, 2, 3]}) for i in range(8)]


def outcomes(evaluate, **options):
    pool = workers(evaluate, **options)
    with contextlib.closing(pool):
        return {outcome.job.number: outcome for outcome in pool.run(JOBS)}


def test_processes_equal_this_process():
    here, there = outcomes(World(fail_above=1.0)), outcomes(World(fail_above=1.0), count=2)
    assert here.keys() == there.keys() == set(range(8))
    for number, outcome in here.items():
        assert there[number].answers == outcome.answers
        assert (there[number].error is None) == (outcome.error is None)
    assert "ValueError: this merge answers nonsense" in there[7].error


def test_a_job_that_kills_its_workers_is_given_up_after_some_attempts():
    found = outcomes(Deadly(), count=2)
    assert {n for n, o in found.items() if o.error} == {7}
    assert found[7].job.attempt == ATTEMPTS
    assert "exit code -9" in found[7].error


CLUSTER = """
import contextlib, sys
import ray
from support.ray_runs import exposed_addresses
from synthetic_world import World
from test_workers import JOBS, outcomes
from merganser.evolve.workers import workers

with contextlib.closing(workers(World(die_once=sys.argv[1]), 2, ray="local")) as pool:
    found = {outcome.job.number: outcome for outcome in pool.run(JOBS)}
    exposed = exposed_addresses()
assert not exposed, f"a local cluster listens on {exposed}"
assert not ray.is_initialized(), "the cluster that the pool started outlives it"
assert {n: o.answers for n, o in found.items()} == {n: o.answers for n, o in outcomes(World()).items()}
assert max(outcome.job.attempt for outcome in found.values()) == 2
"""


def test_ray_equals_this_process_survives_a_dead_actor_and_is_not_exposed(tmp_path):
    pytest.importorskip("ray")
    run_with_ray(CLUSTER, str(tmp_path / "died"), modules=Path(__file__).parent)
    assert (tmp_path / "died").exists()


def test_no_workers_do_no_work():
    with pytest.raises(InputError, match="at least 1"):
        workers(World(), 0)
