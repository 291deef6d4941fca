"""vecenv.adapters.pettingzoo: rows of agents equal a plain loop, faults are errors, and restarts truncate."""

from __future__ import annotations

import functools
import importlib
import itertools
import multiprocessing
import os
import signal
import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

import vecenv
from vecenv.tree import leaves, pick

pytest.importorskip("pettingzoo")

from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test
from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel

from tests.helpers import assert_same, before_each_message
from tests.multi_agent import LeavingEnv, plain_loop
from vecenv.adapters.pettingzoo import ParallelVectorEnv
from vecenv.errors import EpisodeOver

MODES = ("NextStep", "SameStep")


def named(name: str) -> Any:
    """Returns a function that makes the PettingZoo env "package.module:function", or skips the test."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    return functools.partial(made, module, function) if found else None


def made(module: str, function: str) -> Any:
    return getattr(importlib.import_module(module), function)()


def as_parallel(make: Any) -> Any:
    """Returns the env that PettingZoo's own conversion makes of an AEC env."""
    env = make()
    if hasattr(env, "agent_iter"):
        return aec_to_parallel(env) if env.metadata.get("is_parallelizable") else turn_based_aec_to_parallel(env)
    return env


def leaving(index: int, fault: str | None = None) -> Any:
    return functools.partial(LeavingEnv, index, fault)


ENVS = [
    "mpe2.simple_spread_v3:parallel_env",
    "mpe2.simple_tag_v3:parallel_env",
    "mpe2.simple_speaker_listener_v4:env",
    "mpe2.simple_reference_v3:parallel_env",
    "pettingzoo.butterfly.pistonball_v6:parallel_env",
    "pettingzoo.butterfly.knights_archers_zombies_v11:parallel_env",
    "pettingzoo.butterfly.cooperative_pong_v6:parallel_env",
    "pettingzoo.classic.rps_v2:parallel_env",
    "pettingzoo.classic.connect_four_v3:env",
    "pettingzoo.classic.tictactoe_v3:env",
    "pettingzoo.sisl.pursuit_v5:parallel_env",
]


def assert_rows_equal_a_plain_loop(makes: list, mode: str, steps: int, num_workers: int, **options: Any) -> None:
    """Steps envs with sampled actions and compares every row with a plain loop."""
    with ParallelVectorEnv(makes, num_workers=num_workers, autoreset_mode=mode, **options) as envs:
        names = list(as_parallel(makes[0]).possible_agents)
        actions = {
            (m, name): _sampler(as_parallel(makes[0]), name, 100 * m + k)
            for m in range(len(makes))
            for k, name in enumerate(names)
        }
        memory: dict[Any, Any] = {}

        def choose(m: int, t: int, k: int) -> Any:
            """Returns the action that the vector env received for the same agent and step."""
            return memory[m, t, names[k]]

        loops = [
            plain_loop(lambda make=make: as_parallel(make), 7 + m, mode, functools.partial(choose, m))
            for m, make in enumerate(makes)
        ]
        observations, _ = envs.reset(seed=7)
        outcome = None
        for t in range(steps):
            expected = [next(loop) for loop in loops]
            for group_name, rows in envs.groups.items():
                of_group = envs.by_group(observations)[group_name]
                count = len(rows.group.agents)
                for m, (k, name) in itertools.product(range(len(makes)), enumerate(rows.group.agents)):
                    want, row = expected[m][name], m * count + k
                    _assert_observation(rows.single_observation_space, of_group, row, want.observation, (t, m, name))
                    assert rows.valid[row] == want.valid, (t, m, name)
                    assert rows.episode_returns[row] == want.episode_return, (t, m, name)
                    assert rows.episode_lengths[row] == want.episode_length, (t, m, name)
                    if outcome is not None:
                        _, rewards, terminated, truncated, infos = (envs.by_group(part)[group_name] for part in outcome)
                        assert (rewards[row], terminated[row], truncated[row]) == want[1:4], (t, m, name)
                        if want.final is not None:
                            assert infos["_final_obs"][row]
                            _assert_same(rows.single_observation_space, infos["final_obs"][row], want.final)
                        else:
                            assert "final_obs" not in infos or not infos["_final_obs"][row]
            batches = {}
            for group_name, rows in envs.groups.items():
                chosen = []
                for m, name in itertools.product(range(len(makes)), rows.group.agents):
                    of_group = envs.by_group(observations)[group_name]
                    row = m * len(rows.group.agents) + rows.group.agents.index(name)
                    action = actions[m, name](rows.single_observation_space, of_group, row)
                    memory[m, t, name] = action
                    chosen.append(action)
                batches[group_name] = np.stack(chosen)
            outcome = envs.step(envs.from_groups(batches))
            observations = outcome[0]


def _sampler(env: Any, name: str, seed: int) -> Any:
    space = env.action_space(name)
    space.seed(seed)

    def sample(observed: spaces.Space, batch: Any, row: int) -> Any:
        if isinstance(observed, spaces.Dict) and "action_mask" in observed.spaces:
            mask = np.array(batch["action_mask"][row], np.int8)
            return space.sample(mask if mask.any() else None)
        return space.sample()

    return sample


def _assert_observation(space: spaces.Space, batch: Any, row: int, want: Any, where: Any) -> None:
    for path, _ in leaves(space):
        value = pick(batch, path)[row]
        expected = np.zeros_like(value) if want is None else pick(want, path)
        np.testing.assert_array_equal(value, expected, err_msg=str(where))


def _assert_same(space: spaces.Space, one: Any, other: Any) -> None:
    for path, _ in leaves(space):
        np.testing.assert_array_equal(pick(one, path), pick(other, path))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_agents_that_leave_and_enter_equal_a_plain_loop(mode, num_workers):
    assert_rows_equal_a_plain_loop([leaving(m) for m in range(3)], mode, 40, num_workers)


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("mode", [pytest.param("NextStep", marks=pytest.mark.slow), "SameStep"])
def test_envs_of_packages_equal_a_plain_loop(name, mode):
    make = named(name)
    steps = 30 if "butterfly" in name or "sisl" in name else 60
    assert_rows_equal_a_plain_loop([make] * 3, mode, steps, num_workers=2)


def test_rows_hold_the_closed_form():
    with ParallelVectorEnv([leaving(0)], num_workers=0, groups={"all a": ["a_0", "a_1", "a_2"], "b": ["b_0"]}) as envs:
        envs.reset(seed=0)
        returns = {}
        for step in range(1, 8):
            _, rewards, terminated, truncated, _ = envs.step({"all a": np.array([1, 2, 3]), "b": np.array([0])})
            for k in range(3):
                if (terminated["all a"] | truncated["all a"])[k]:
                    returns[k] = (envs.groups["all a"].episode_returns[k], envs.groups["all a"].episode_lengths[k])
            assert envs.valid["all a"].tolist() == [step < 3, step < 5, 2 <= step < 7]
            assert envs.valid["b"].tolist() == [step < 4]
            assert rewards["b"].tolist() == [float(step) if step <= 4 else 0.0]
    assert returns[0] == (pytest.approx(6 + 3 * 0.25), 3)
    assert returns[1] == (pytest.approx(15 + 5 * (0.5 + 0.001)), 5)
    assert returns[2] == (pytest.approx(25 + 5 * (0.75 + 0.002)), 5)  # steps 3 to 7


def test_disabled_autoreset_needs_a_reset():
    with ParallelVectorEnv([leaving(0), leaving(1)], num_workers=1, autoreset_mode="Disabled") as envs:
        envs.reset(seed=3)
        actions = {name: np.zeros(rows.num_envs, np.int64) for name, rows in envs.groups.items()}
        for _ in range(7):
            envs.step(actions)
        assert not any(valid.any() for valid in envs.valid.values())
        with pytest.raises(EpisodeOver, match=r"envs \[0, 1\] are over"):
            envs.step(actions)
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.valid["b"].tolist() == [True, False]


def test_a_mask_of_rows_must_hold_whole_envs():
    make = named("mpe2.simple_spread_v3:parallel_env")
    with ParallelVectorEnv([make] * 2, num_workers=0) as envs:
        before, _ = envs.reset(seed=0)
        after, _ = envs.reset(options={"reset_mask": np.repeat([True, False], 3)})
        assert (before[:3] != after[:3]).any() and (before[3:] == after[3:]).all()
        with pytest.raises(ValueError, match="only some agents"):
            envs.reset(options={"reset_mask": np.array([True, False, False, False, False, False])})


def test_groups_step_together():
    with ParallelVectorEnv([leaving(0), leaving(1)], num_workers=2) as envs:
        envs.reset(seed=0)
        a, b = envs.groups.values()
        assert (a.num_envs, b.num_envs, envs.num_envs) == (6, 2, 8)
        with pytest.raises(ValueError, match=r"one entry for each of the groups \['a', 'b'\]"):
            envs.step({"a": np.ones(6, np.int64)})
        with pytest.raises(NoAsyncCallError):
            envs.step_wait()
        actions = {"a": np.ones(6, np.int64), "b": np.zeros(2, np.int64)}
        envs.step_async(actions)
        for call in (lambda: envs.step_async(actions), envs.reset):
            with pytest.raises(AlreadyPendingCallError):
                call()
        rewards = envs.step_wait(timeout=20)[1]
        assert rewards["a"].tolist() == [1.25, 1.251, 0.0] * 2 and rewards["b"].tolist() == [1.0] * 2


@pytest.mark.parametrize("groups", [{"x": ["a_0"]}, {"x": ["a_0", "b_0"], "y": ["a_1", "a_2"]}, "unknown"])
def test_groups_that_do_not_fit_are_errors(groups):
    with pytest.raises((ValueError, vecenv.EnvError), match=r"name each agent once|different spaces|is unknown"):
        ParallelVectorEnv([leaving(0)], num_workers=1, groups=groups)


def test_an_env_that_cannot_be_used_is_closed():
    closed = []

    class Closing(LeavingEnv):
        def close(self):
            closed.append(True)

    with pytest.raises(ValueError, match="is unknown"):
        ParallelVectorEnv([Closing], num_workers=0, groups="unknown")
    assert closed


def test_names_form_groups():
    make = named("mpe2.simple_world_comm_v3:parallel_env")
    with ParallelVectorEnv([make], num_workers=0, groups="names") as envs:
        assert {name: len(rows.group.agents) for name, rows in envs.groups.items()} == {
            "leadadversary": 1,
            "adversary": 3,
            "agent": 2,
        }


def test_the_state_becomes_part_of_the_observation():
    with ParallelVectorEnv([leaving(0)] * 2, num_workers=1, state=True) as envs:
        observations, _ = envs.reset(seed=0)
        np.testing.assert_array_equal(observations["a"]["state"], np.tile(np.float32([0, 3]), (6, 1)))
        assert observations["a"]["observation"].shape == (6, 3)
        observations = envs.step({"a": np.zeros(6, np.int64), "b": np.zeros(2, np.int64)})[0]
        np.testing.assert_array_equal(observations["b"]["state"], np.tile(np.float32([1, 3]), (2, 1)))


class Overflows(LeavingEnv):
    """In step 2, the observation of agent a_1 is too large for float32."""

    def step(self, actions):
        observations, *others = super().step(actions)
        if self.steps == 2:
            observations["a_1"][0] = 1e300
        return observations, *others


def test_float32_observations_keep_the_rewards_and_must_be_finite():
    actions = {"a": np.zeros(3, np.int64), "b": np.zeros(1, np.int64)}
    with ParallelVectorEnv([Overflows], num_workers=0, float32_observations=True) as envs:
        assert envs.reset(seed=0)[0]["a"].dtype == envs.groups["a"].single_observation_space.dtype == np.float32
        rewards = envs.step(actions)[1]["a"]
        assert rewards.dtype == np.float64 and rewards.tolist() == [1.0, 1.001, 0.0]
        assert envs.episode_returns["a"].tolist() == [1.0, 1.001, 0.0]
        with (
            pytest.raises(ValueError, match=r"observation\['a'\]\['observation'\] of env 0 is not finite"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # numpy warns of the overflow
            envs.step(actions)


class MaskedInfos(LeavingEnv):
    """Masks are in infos, as in some of PettingZoo's envs."""

    def _with_masks(self, infos):
        masks = {name: np.arange(4) != self.steps % 4 for name in infos}
        return {name: {**info, "action_mask": masks[name].astype(np.int8)} for name, info in infos.items()}

    def reset(self, seed=None, options=None):
        observations, infos = super().reset(seed, options)
        return observations, self._with_masks(infos)

    def step(self, actions):
        *results, infos = super().step(actions)
        return *results, self._with_masks(infos)


def test_masks_in_infos_become_part_of_the_observation():
    with ParallelVectorEnv([MaskedInfos] * 2, num_workers=1, info_masks=True) as envs:
        observations, _ = envs.reset(seed=0)
        assert observations["b"]["action_mask"].tolist() == [[0, 1, 1, 1]] * 2
        observations = envs.step({"a": np.zeros(6, np.int64), "b": np.zeros(2, np.int64)})[0]
        assert observations["a"]["action_mask"][:2].tolist() == [[1, 0, 1, 1]] * 2
        assert observations["a"]["action_mask"][2].tolist() == [0] * 4  # not alive
    with (
        ParallelVectorEnv([MaskedInfos], num_workers=1, info_masks=None) as envs,
        pytest.raises(vecenv.EnvError, match="set info_masks"),
    ):
        envs.reset(seed=0)


class OneMaskedGroup(MaskedInfos):
    """Only the agents of group "b" have discrete actions and masks."""

    def action_space(self, agent):
        return super().action_space(agent) if agent.startswith("b") else spaces.Box(-1, 1, (2,), np.float32)

    def _with_masks(self, infos):
        masked = super()._with_masks(infos)
        return {name: masked[name] if name.startswith("b") else info for name, info in infos.items()}


def test_masks_in_infos_restrict_only_groups_with_discrete_actions():
    with ParallelVectorEnv([OneMaskedGroup] * 2, num_workers=1, info_masks=True) as envs:
        observations, _ = envs.reset(seed=0)
        assert observations["b"]["action_mask"].tolist() == [[0, 1, 1, 1]] * 2
        assert not isinstance(observations["a"], dict)


def test_masks_that_can_restrict_no_action_are_an_error():
    class NoneMasked(OneMaskedGroup):
        def action_space(self, agent):
            return spaces.Box(-1, 1, (2,), np.float32)

    with pytest.raises(vecenv.EnvError, match="none of which is discrete: omit info_masks"):
        ParallelVectorEnv([NoneMasked], num_workers=1, info_masks=True)


def test_the_error_for_an_env_without_possible_agents_names_them():
    class Unnamed(ParallelEnv):
        def step(self, actions):
            raise NotImplementedError

    with pytest.raises(vecenv.EnvError, match="Unnamed does not define possible_agents: set it"):
        ParallelVectorEnv([Unnamed], num_workers=1)


def test_infos_are_those_of_the_rows():
    with ParallelVectorEnv([leaving(0)] * 2, num_workers=1, autoreset_mode="SameStep") as envs:
        _, infos = envs.reset(seed=0)
        assert infos["a"]["_started"].tolist() == [True, True, False] * 2
        for _ in range(7):
            *_, infos = envs.step({"a": np.zeros(6, np.int64), "b": np.zeros(2, np.int64)})
        assert infos["a"]["final_info"]["step"].tolist()[2] == 7 and infos["a"]["_started"].tolist()[0]
        assert infos["a"]["_final_obs"].tolist() == [False, False, True] * 2
    with ParallelVectorEnv([leaving(0)], num_workers=1, infos=False) as envs:
        assert envs.reset(seed=0)[1] == {"a": {}, "b": {}}


def test_an_env_that_raises_is_an_error_that_names_it():
    with ParallelVectorEnv([leaving(0), leaving(1, "raise")], num_workers=2) as envs:
        envs.reset(seed=0)
        actions = {name: np.zeros(rows.num_envs, np.int64) for name, rows in envs.groups.items()}
        with pytest.raises(vecenv.EnvError, match=r"env 1 in worker 1 raised during step(.|\n)*motor is on fire"):
            for _ in range(4):
                envs.step(actions)
        with pytest.raises(vecenv.StateError):
            envs.step(actions)


def test_a_killed_worker_is_an_error_and_a_late_one_times_out():
    for fault, error in (("sigkill", vecenv.WorkerDied), ("hang", multiprocessing.TimeoutError)):
        with ParallelVectorEnv([leaving(0), leaving(1, fault)], num_workers=2) as envs:
            envs.reset(seed=0)
            actions = {name: np.zeros(rows.num_envs, np.int64) for name, rows in envs.groups.items()}
            with pytest.raises(error):
                for _ in range(4):
                    envs.step_async(actions)
                    envs.step_wait(timeout=1.0)
            envs.close(terminate=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_restarted_worker_truncates_the_agents_that_were_alive(mode):
    makes = [leaving(0), leaving(1, "sigkill")]
    with ParallelVectorEnv(makes, num_workers=2, on_worker_death="restart", autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        actions = {name: np.zeros(rows.num_envs, np.int64) for name, rows in envs.groups.items()}
        for _ in range(3):
            envs.step(actions)
        _, rewards, terminated, truncated, infos = envs.step(actions)
        assert rewards["a"][3:].tolist() == [0.0] * 3 and not terminated["a"][3:].any()
        assert truncated["a"][3:].tolist() == [False, True, True]  # a_0 had already left
        assert truncated["b"].tolist() == [True, True]  # env 0's agent b is truncated in step 4
        assert infos["a"]["worker_restarted"].tolist() == [False] * 3 + [True] * 3
        assert envs.groups["a"].episode_lengths[3:].tolist() == [0, 3, 1]
        assert envs.groups["a"].valid[3:].tolist() == ([True, True, False] if mode == "SameStep" else [False] * 3)
        if mode == "SameStep":
            assert infos["a"]["final_obs"][4][1] == 3
        envs.step(actions)
        assert envs.groups["a"].valid[3:5].all()


@pytest.mark.parametrize("receives", [False, True], ids=["step", "recv"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_the_joint_env_returns_the_truncation_by_a_restart(mode, receives):
    how = {"num_workers": 1, "on_worker_death": "restart", "autoreset_mode": mode}
    with ParallelVectorEnv([leaving(1, "sigkill")], **how) as envs:
        envs.joint.reset(seed=0)
        actions = {name: np.zeros((1, len(rows.group.agents)), np.int64) for name, rows in envs.groups.items()}
        for _ in range(4):
            if receives:
                envs.joint.send(actions)
            observations = (envs.joint.recv() if receives else envs.joint.step(actions))[0]
        assert observations["a"]["truncated"].tolist() == [[0, 1, 1]]  # a_0 had already left
        assert observations["a"]["valid"].tolist() == ([[1, 1, 0]] if mode == "SameStep" else [[0, 0, 0]])


SHARED = LeavingEnv()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_rows_cannot_share_a_pettingzoo_env(num_workers):
    with pytest.raises(ValueError, match=r"which is also env 0.*build a new env in each call"):
        ParallelVectorEnv([lambda: SHARED] * 2, num_workers=num_workers)


def test_states_restore_rows_and_envs_exactly():
    def fresh() -> ParallelVectorEnv:
        return ParallelVectorEnv([leaving(m) for m in range(3)], num_workers=2)

    with fresh() as one, fresh() as other:
        one.reset(seed=5)
        actions = {name: np.ones(rows.num_envs, np.int64) for name, rows in one.groups.items()}
        for _ in range(3):
            one.step(actions)
        other.set_state(vecenv.state.loads(vecenv.state.dumps(one.get_state())))
        np.testing.assert_array_equal(one.valid["a"], other.valid["a"])
        for _ in range(12):
            for mine, theirs in zip(one.step(actions)[:4], other.step(actions)[:4], strict=True):
                for name in mine:
                    np.testing.assert_array_equal(mine[name], theirs[name])
            np.testing.assert_array_equal(one.episode_returns["a"], other.episode_returns["a"])


class MasklessEnds(MaskedInfos):
    """The last step of an agent has no mask."""

    def step(self, actions):
        *results, terminated, truncated, infos = super().step(actions)
        for name in infos:
            if terminated.get(name) or truncated.get(name):
                del infos[name]["action_mask"]
        return *results, terminated, truncated, infos


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [2, 3, 4, 6, 7, 8])
def test_restored_states_of_agents_include_their_masks_and_the_global_state(mode, steps):
    def fresh() -> ParallelVectorEnv:
        return ParallelVectorEnv([MasklessEnds], num_workers=0, info_masks=True, state=True, autoreset_mode=mode)

    with fresh() as one, fresh() as other:
        actions = {name: np.ones(rows.num_envs, np.int64) for name, rows in one.groups.items()}
        one.reset(seed=5)
        for _ in range(steps):
            one.step(actions)
        other.reset(seed=6)  # leaves other masks behind
        other.step(actions)
        other.set_state(vecenv.state.loads(vecenv.state.dumps(one.get_state())))
        for _ in range(10):
            assert_same(one.step(actions), other.step(actions))
            assert_same(one.valid, other.valid)


def test_an_env_without_state_methods_cannot_be_saved():
    make = named("mpe2.simple_spread_v3:parallel_env")
    with ParallelVectorEnv([make], num_workers=0) as envs:
        envs.reset(seed=0)
        with pytest.raises(vecenv.NotRestorable, match="get_state"):
            envs.get_state()


class Lingering(LeavingEnv):
    """Agents whose episodes have ended stay in env.agents, with their flags set."""

    def reset(self, seed=None, options=None):
        result = super().reset(seed, options)
        self._ended = {}
        return result

    def step(self, actions):
        live = [name for name in self.agents if name not in self._ended]
        self.agents = live
        observations, rewards, terminated, truncated, infos = super().step({name: actions[name] for name in live})
        for name in self._ended:
            observations[name], rewards[name] = self._observe(name), 0.0
            terminated[name], truncated[name] = self._ended[name]
        self._ended |= {n: (terminated[n], truncated[n]) for n in live if terminated[n] or truncated[n]}
        self.agents = [] if not self.agents else [*self.agents, *self._ended]
        return observations, rewards, terminated, truncated, infos


def test_agents_that_stay_in_the_list_after_their_end_are_not_alive():
    with ParallelVectorEnv([Lingering], num_workers=0) as envs:
        envs.reset(seed=0)
        alive = []
        for _ in range(7):
            envs.step({name: np.zeros(rows.num_envs, np.int64) for name, rows in envs.groups.items()})
            alive.append((envs.valid["a"].tolist(), envs.valid["b"].tolist()))
        assert alive == [([s < 3, s < 5, 2 <= s < 7], [s < 4]) for s in range(1, 8)]


class Reordered(LeavingEnv):
    possible_agents = ("a_1", "a_0", "a_2", "b_0")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_envs_whose_agents_have_another_order_are_an_error(num_workers):
    with pytest.raises((ValueError, vecenv.EnvError), match=r"env 1 has the agents.*a_1.*same order"):
        ParallelVectorEnv([LeavingEnv, Reordered], num_workers=num_workers)


class Wide(LeavingEnv):
    """Observations have other bounds in each env."""

    def observation_space(self, agent):
        size = 3 if agent[0] == "a" else 2
        return spaces.Box(-1e3 * (self.index + 1), 1e3 * (self.index + 1), (size,), np.float64)


@pytest.mark.parametrize("options", [{}, {"float32_observations": True, "autoreset_mode": "SameStep"}])
def test_the_bounds_of_observations_may_differ_between_envs(options):
    makes = [lambda m=m: Wide(m) for m in range(2)]
    with pytest.raises(RuntimeError, match="observation_mode='different'"):
        ParallelVectorEnv(makes, num_workers=0)
    with ParallelVectorEnv(makes, num_workers=2, observation_mode="different", **options) as envs:
        assert envs.observation_space["a"].high[:, 0].tolist() == [1e3] * 3 + [2e3] * 3
        assert envs.groups["b"].observation_space.high[:, 1].tolist() == [1e3, 2e3]
        assert envs.reset(seed=0)[0]["a"].shape == (6, 3)


def test_clipped_actions_need_the_same_bounds_in_every_env():
    class Bounded(LeavingEnv):
        def action_space(self, agent):
            return spaces.Box(-1.0 - self.index, 1.0 + self.index, (1,))

    with pytest.raises(RuntimeError, match=r"action space different from .*env 1: .*-2\.0, 2\.0"):
        ParallelVectorEnv([lambda m=m: Bounded(m) for m in range(2)], num_workers=2, clip_actions=True)


def test_a_restored_state_has_no_observations_of_agents_that_are_gone():
    with ParallelVectorEnv([leaving(0)], num_workers=0) as one, ParallelVectorEnv([leaving(0)], num_workers=0) as other:
        actions = {"a": np.zeros(3, np.int64), "b": np.zeros(1, np.int64)}
        one.reset(seed=0)
        for _ in range(6):
            one.step(actions)
        other.reset(seed=0)
        other.step(actions)
        other.set_state(one.get_state())
        for mine, theirs in zip(one.step(actions)[0].values(), other.step(actions)[0].values(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


class CommonInfos(LeavingEnv):
    def step(self, actions):
        *results, infos = super().step(actions)
        return *results, {**infos, "common": self.steps, "zero": 0, "grid": np.zeros(2)}


def test_infos_of_no_agent_reach_all_rows():
    for mode in MODES:
        with ParallelVectorEnv([CommonInfos], num_workers=0, autoreset_mode=mode) as envs:
            envs.reset(seed=0)
            for _ in range(7):
                infos = envs.step({"a": np.zeros(3, np.int64), "b": np.zeros(1, np.int64)})[4]["a"]
            last = infos["final_info"] if mode == "SameStep" else infos
            assert last["common"].tolist() == [7, 7, 7] and last["zero"].tolist() == [0, 0, 0]


class WrongMask(MaskedInfos):
    def _with_masks(self, infos):
        return {name: {"action_mask": np.ones(1, np.int8)} for name in infos}


def test_masks_and_states_of_the_wrong_shape_are_errors():
    with (
        ParallelVectorEnv([WrongMask], num_workers=0, info_masks=True) as envs,
        pytest.raises(ValueError, match=r"observation\['action_mask'\] of agent 'a_0' has shape"),
    ):
        envs.reset(seed=0)


def test_group_names_differ_from_the_names_of_other_agents():
    from vecenv.adapters.joint_env import groups_of

    spaces_of = {"agent_0": 1, "agent": 2, "agent_1": 1, "agent_2": 3}.__getitem__
    names = groups_of(["agent_0", "agent", "agent_1", "agent_2"], spaces_of, None)
    assert names == {"agent-2": ["agent_0", "agent_1"], "agent": ["agent"], "agent-3": ["agent_2"]}


def test_a_cut_episode_that_has_just_begun_has_no_steps(tmp_path):
    class DiesInItsSecondEpisode(LeavingEnv):
        LAST: ClassVar = {**LeavingEnv.LAST, "a_1": (7, True)}  # alive in the last step and after it

        def step(self, actions):
            if self.episode == 1 and os.path.exists(flag):
                os.unlink(flag)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(actions)

    flag = str(tmp_path / "dies")
    (tmp_path / "dies").touch()
    how = {"on_worker_death": "restart", "autoreset_mode": "SameStep"}
    with ParallelVectorEnv([DiesInItsSecondEpisode], num_workers=1, **how) as envs:
        envs.reset(seed=0)
        for _ in range(8):
            truncated = envs.step({"a": np.zeros(3, np.int64), "b": np.zeros(1, np.int64)})[3]
        assert truncated["a"].tolist() == [True, True, False]
        assert envs.episode_lengths["a"].tolist() == [0, 0, 0] and not envs.episode_returns["a"].any()


def test_a_closed_vector_env_refuses_steps():
    envs = ParallelVectorEnv([leaving(0)], num_workers=0)
    envs.reset(seed=0)
    envs.close()
    with pytest.raises(vecenv.StateError, match="close"):
        envs.step_async({"a": np.zeros(3, np.int64), "b": np.zeros(1, np.int64)})


class Vanishing(LeavingEnv):
    def step(self, actions):
        results = super().step(actions)
        self.agents = [name for name in self.agents if name != "a_1"]
        return results


class Incomplete(LeavingEnv):
    def step(self, actions):
        observations, rewards, *others = super().step(actions)
        del rewards["a_1"]
        return observations, rewards, *others


class WrongShape(LeavingEnv):
    def _observe(self, agent):
        return np.zeros(3) if agent == "b_0" else super()._observe(agent)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Vanishing, "a_1.* no longer in env.agents"),
        (Incomplete, "no observation, reward or flag for agent 'a_1'"),
        (WrongShape, "observation of agent 'b_0' has shape"),
    ],
)
def test_envs_that_break_the_interface_are_errors(make, message):
    with (
        pytest.raises(vecenv.EnvError, match=message),
        ParallelVectorEnv([make], num_workers=1) as envs,
    ):
        envs.reset(seed=0)
        envs.step({name: np.zeros(rows.num_envs, np.int64) for name, rows in envs.groups.items()})


def test_wrong_actions_are_errors():
    make = named("mpe2.simple_spread_v3:parallel_env")
    with ParallelVectorEnv([make] * 2, num_workers=1) as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="needs actions for 6 agents"):
            envs.step(np.zeros(2, np.int64))
        with pytest.raises(TypeError, match="float64"):
            envs.step(np.zeros(6))
        envs.step(np.zeros(6, np.int64))
    with pytest.raises(TypeError, match="not a PettingZoo env"):
        ParallelVectorEnv([object], num_workers=0)


def test_calls_reach_the_pettingzoo_env():
    with ParallelVectorEnv([leaving(0), leaving(3)], num_workers=2) as envs:
        envs.reset(seed=0)
        assert envs.get_attr("index") == (0, 3)
        envs.set_attr("index", [5, 6])
        assert envs.call("index") == (5, 6)
        assert [state.tolist() for state in envs.call("state")] == [[0, 3], [0, 3]]


class Shown(ParallelEnv):
    """One env of a ParallelVectorEnv, read from its rows, as a ParallelEnv again."""

    metadata: ClassVar = {"name": "shown"}

    def __init__(self, make):
        self._envs = ParallelVectorEnv([make], num_workers=1, autoreset_mode="Disabled")
        self.possible_agents = list(self._envs.agents)
        self._row = {name: (rows, k) for rows in self._envs.groups.values() for k, name in enumerate(rows.group.agents)}
        self.agents: list = []
        self.render_mode = None

    def observation_space(self, agent):
        return self._row[agent][0].single_observation_space

    def action_space(self, agent):
        rows, _ = self._row[agent]
        return rows.env_action_space

    def _by_agent(self, of_groups, agents):
        wrapped = self._envs.by_group(of_groups)
        found = {}
        for name in agents:
            rows, k = self._row[name]
            found[name] = wrapped[rows.group.name][k]
        return found

    def _valid(self):
        return [name for name, live in self._by_agent(self._envs.valid, self.possible_agents).items() if live]

    def reset(self, seed=None, options=None):
        observations, _ = self._envs.reset(seed=seed, options=options)
        self.agents = self._valid()
        return self._by_agent(observations, self.agents), {name: {} for name in self.agents}

    def step(self, actions):
        batches = {}
        for group, rows in self._envs.groups.items():
            batches[group] = np.array([actions.get(name, rows.env_action_space.sample()) for name in rows.group.agents])
        results = self._envs.step(self._envs.from_groups(batches))[:4]
        before, self.agents = self.agents, self._valid()
        shown = [*before, *(name for name in self.agents if name not in before)]
        return *(self._by_agent(part, shown) for part in results), {name: {} for name in shown}

    def close(self):
        self._envs.close()


@pytest.mark.parametrize("name", ["mpe2.simple_spread_v3:parallel_env", "mpe2.simple_tag_v3:parallel_env", "leaving"])
def test_pettingzoos_own_test_accepts_what_the_rows_show(name):
    env = Shown(LeavingEnv if name == "leaving" else named(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_api_test(env, num_cycles=60)
    env.close()


def test_a_step_sends_one_message_per_worker():
    with ParallelVectorEnv([leaving(m) for m in range(6)], num_workers=2, infos=False) as envs:
        envs.reset(seed=0)
        actions = {name: np.zeros(rows.num_envs, np.int64) for name, rows in envs.groups.items()}
        sent: list[bytes] = []
        with before_each_message(sent.append):
            envs.step(actions)
        assert [len(frame) for frame in sent] == [9, 9]


def test_a_killed_worker_leaves_the_others_rows_intact():
    """SIGKILL from outside, at any moment, is an error."""
    with ParallelVectorEnv([leaving(m) for m in range(4)], num_workers=2) as envs:
        envs.reset(seed=0)
        actions = {name: np.zeros(rows.num_envs, np.int64) for name, rows in envs.groups.items()}
        envs.step(actions)
        os.kill(envs.joint.processes[1].pid, signal.SIGKILL)
        with pytest.raises(vecenv.WorkerDied, match="worker 1"):
            envs.step(actions)
