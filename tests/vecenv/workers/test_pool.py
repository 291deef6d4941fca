"""Tests of vecenv/workers/pool.py: how envs are spread over workers."""

import itertools

import pytest

from vecenv.workers.pool import spread


@pytest.mark.parametrize("at_most", [None, 1, 3, 20])
def test_envs_are_spread_in_order_and_as_evenly_as_possible_over_at_most_so_many_workers(at_most):
    for num_envs, num_workers in itertools.product(range(1, 9), repeat=2):
        if num_workers > num_envs:
            continue
        ranges = spread(num_envs, num_workers, at_most)
        assert [run.index for run in ranges] == list(range(min(num_workers, at_most or num_workers)))
        assert [env for run in ranges for env in range(num_envs)[run.rows]] == list(range(num_envs))
        sizes = {run.high - run.low for run in ranges}
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_workers", [0, 4])
def test_each_worker_needs_an_env(num_workers):
    with pytest.raises(ValueError, match=f"num_workers={num_workers} for 3 envs"):
        spread(3, num_workers)
