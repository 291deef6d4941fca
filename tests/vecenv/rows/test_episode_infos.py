"""Tests of vecenv/rows/episode_infos.py: selected infos of an episode's last step travel through memory."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, assert_same
from vecenv.rows import episode_infos

KEYS = ("is_success", "nested/score", "slashed/name", "rare")
MODES = list(AutoresetMode)


class ScoringEnv(CountingEnv):
    """Its infos hold a bool, a nested number, a key with a slash, and a key that only odd episodes have."""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"is_success": True, "nested": {"score": -1.0}, "rare": np.array([-1])}

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {
            "is_success": (self.index + self.episode) % 2 == 0,
            "nested": {"score": np.float32(self.steps + self.episode / 4)},
            "slashed/name": self.index,
            "label": "text",
        }
        if self.episode % 2:
            info["rare"] = np.array([self.episode])
        return observation, reward, terminated, truncated, info


def functions(num_envs=4, length=3):
    return [lambda i=i: ScoringEnv(i, length + i % 3) for i in range(num_envs)]


def batched(num_envs=4):
    """Returns a batch of envs that Gymnasium's SyncVectorEnv steps in one call."""
    fns = functions(num_envs)
    return vecenv.Batched(
        lambda num_envs, autoreset_mode: gym.vector.SyncVectorEnv(fns, autoreset_mode=autoreset_mode), num_envs
    )


def expected(num_envs, episodes):
    """Returns the values that a plain loop reads, for each episode of each env."""
    found = {}
    for i, make in enumerate(functions(num_envs)):
        env = make()
        for episode in range(episodes):
            env.reset()
            over = False
            while not over:
                *_, terminated, truncated, info = env.step(0)
                over = terminated or truncated
            rare = float(info["rare"].item()) if "rare" in info else np.nan
            found[i, episode] = [float(info["is_success"]), info["nested"]["score"], info["slashed/name"], rare]
    return found


def play(envs, with_infos, steps=14):
    """Returns the infos of each episode, and checks that they are NaN where no episode ends."""
    found, episode = {}, [0] * envs.num_envs
    assert bool(envs.reset(seed=0)[1]) is with_infos
    assert all(np.isnan(values).all() for values in envs.episode_infos.values())
    for _ in range(steps):
        _, _, terminated, truncated, all_infos = envs.step([0] * envs.num_envs)
        assert with_infos or all_infos.keys() <= {"final_obs", "_final_obs"}
        over, infos = terminated | truncated, envs.episode_infos
        assert tuple(infos) == envs.info_keys == KEYS
        for values in infos.values():
            assert values.dtype == np.float64 and np.isnan(values[~over]).all()
        for i in np.flatnonzero(over):
            found[int(i), episode[i]] = [values[i] for values in infos.values()]
            episode[i] += 1
        if envs.autoreset_mode == AutoresetMode.DISABLED and over.any():
            envs.reset(options={"reset_mask": over})
            assert all(np.isnan(values).all() for values in envs.episode_infos.values())
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("infos", [True, False])
@pytest.mark.parametrize("envs", ["serial", "parallel", "batched", "batched in a worker"])
def test_episode_infos_equal_those_of_a_plain_loop(mode, infos, envs):
    how = {"autoreset_mode": mode, "infos": infos, "info_keys": list(KEYS)}
    with {
        "serial": lambda: vecenv.SyncVectorEnv(functions(), **how),
        "parallel": lambda: vecenv.AsyncVectorEnv(functions(), num_workers=2, **how),
        "batched": lambda: vecenv.SyncVectorEnv(batched(), **how),
        "batched in a worker": lambda: vecenv.AsyncVectorEnv(batched(), num_workers=1, **how),
    }[envs]() as vector:
        found = play(vector, infos)
    assert len(found) >= 8
    wanted = expected(4, episodes=5)
    for episode, values in found.items():
        np.testing.assert_array_equal(values, wanted[episode])


SUMS = ("nested/score:sum", "nested/score:mean", "slashed/name:mean", "rare:sum", "often:sum", "once:mean",
        "never:mean", "a:b:sum", "a:b", "c:sum:last", "_odd:sum", "is_success:mean")  # fmt: skip


class SummedEnv(ScoringEnv):
    """Has "often" at odd steps, "once" at one step, keys with colons, and a key that begins with an underscore."""

    def step(self, action):
        *results, info = super().step(action)
        some = {"often": 10 * self.index + self.steps} if self.steps % 2 else {}
        some |= {"once": 10 + self.index} if self.steps == 2 else {}
        return *results, {**info, **some, "a:b": self.steps, "c:sum": self.index, "_odd": float(self.steps)}


def summed_functions(num_envs=4, length=3):
    return [lambda i=i: SummedEnv(i, length + i % 3) for i in range(num_envs)]


def summed_by_a_loop(num_envs, episodes):
    """Returns the values of SUMS for each episode of each env."""
    found = {}
    for i, make in enumerate(summed_functions(num_envs)):
        env = make()
        for episode in range(episodes):
            env.reset()
            infos, over = [], False
            while not over:
                *_, terminated, truncated, info = env.step(0)
                infos.append({**info, "nested/score": info["nested"]["score"]})
                over = terminated or truncated
            values = []
            for name in SUMS:
                key, _, kind = name.rpartition(":") if name != "a:b" else (name, "", "last")
                of_key = [float(np.squeeze(one[key])) for one in infos if key in one]
                how = {"last": lambda one: one[-1], "sum": np.sum, "mean": np.mean}[kind]
                values.append(how(of_key) if of_key else np.nan)
            found[i, episode] = values
    return found


def play_summed(envs, found, episode, steps=14):
    for _ in range(steps):
        _, _, terminated, truncated, _ = envs.step([0] * envs.num_envs)
        over, infos = terminated | truncated, envs.episode_infos
        for i in np.flatnonzero(over):
            found[int(i), episode[i]] = [values[i] for values in infos.values()]
            episode[i] += 1
        if envs.autoreset_mode == AutoresetMode.DISABLED and over.any():
            envs.reset(options={"reset_mask": over})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("envs", ["serial", "parallel", "batched"])
def test_sums_and_means_count_the_steps_of_one_episode(mode, envs):
    """Neither the infos of resets nor those of other episodes count."""
    how = {"autoreset_mode": mode, "infos": False, "info_keys": SUMS}
    batch = vecenv.Batched(
        lambda num_envs, autoreset_mode: gym.vector.SyncVectorEnv(summed_functions(), autoreset_mode=autoreset_mode), 4
    )
    with {
        "serial": lambda: vecenv.SyncVectorEnv(summed_functions(), **how),
        "parallel": lambda: vecenv.AsyncVectorEnv(summed_functions(), num_workers=2, **how),
        "batched": lambda: vecenv.SyncVectorEnv(batch, **how),
    }[envs]() as vector:
        found = {}
        vector.reset(seed=0)
        play_summed(vector, found, [0] * 4)
    assert len(found) >= 8
    wanted = summed_by_a_loop(4, episodes=5)
    for episode, values in found.items():
        np.testing.assert_allclose(values, wanted[episode], rtol=1e-12, err_msg=str(episode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("envs", ["serial", "parallel", "batched"])
def test_infos_so_far_are_those_of_an_episode_that_would_end_now(mode, envs):
    """A cut-off episode counts with them, for example in an evaluation."""
    keys = ["a:b", "a:b:sum", "a:b:mean", "often", "label", "nested/score"]
    how = {"autoreset_mode": mode, "infos": False, "info_keys": keys}
    makes = [lambda i=i: SummedEnv(i, 3 + i) for i in range(3)]
    batch = vecenv.Batched(
        lambda num_envs, autoreset_mode: gym.vector.SyncVectorEnv(makes, autoreset_mode=autoreset_mode), 3
    )
    with {
        "serial": lambda: vecenv.SyncVectorEnv(makes, **how),
        "parallel": lambda: vecenv.AsyncVectorEnv(makes, num_workers=2, **how),
        "batched": lambda: vecenv.SyncVectorEnv(batch, **how),
    }[envs]() as vector:
        assert all(np.isnan(values).all() for values in vector.infos_so_far.values())
        vector.reset(seed=0)
        assert all(np.isnan(values).all() for values in vector.infos_so_far.values())
        for _ in range(2):
            vector.step([0] * 3)  # the strings under "label" would be an error at the end of an episode
        found = vector.infos_so_far
        assert found["a:b"].tolist() == [2] * 3 and found["a:b:sum"].tolist() == [3] * 3
        assert found["a:b:mean"].tolist() == [1.5] * 3 and found["nested/score"].tolist() == [2.0] * 3
        assert np.isnan(found["often"]).all() and np.isnan(found["label"]).all()
        vector.reset(options={"reset_mask": np.array([False, True, False])})
        np.testing.assert_array_equal(vector.infos_so_far["a:b:sum"], [3, np.nan, 3])


def test_a_reset_in_the_middle_of_an_episode_drops_its_sums():
    with vecenv.SyncVectorEnv(summed_functions(2), info_keys=["a:b:sum"]) as envs:
        envs.reset(seed=0)
        envs.step([0, 0])
        envs.reset(options={"reset_mask": np.array([True, False])})
        ends = [envs.step([0, 0]) and envs.episode_infos["a:b:sum"] for _ in range(3)]
        np.testing.assert_array_equal(ends, [[np.nan, np.nan], [np.nan, np.nan], [6, 10]])


class Restorable(SummedEnv):
    def get_state(self):
        return [self.steps, self.episode]

    def set_state(self, state):
        self.steps, self.episode = state


def test_sums_continue_from_a_saved_state_and_are_unknown_if_it_lacks_them():
    def functions():
        return [lambda i=i: Restorable(i, 3 + i) for i in range(2)]

    with vecenv.SyncVectorEnv(functions(), info_keys=["a:b:sum"]) as envs:
        envs.reset(seed=0)
        begun = envs.get_state()
        for _ in range(3):  # ends the episode of env 0 only
            envs.step([0, 0])
        states = vecenv.state.loads(vecenv.state.dumps(envs.get_state()))
    keys = ["a:b:mean", "slashed/name:mean"]
    with vecenv.AsyncVectorEnv(functions(), num_workers=1, info_keys=keys) as envs:
        envs.set_state(states)
        ends = []
        for _ in range(6):
            envs.step([0, 0])
            ends.append(np.stack(list(envs.episode_infos.values())))
        envs.set_state(begun)  # in which nothing is missing, because no step was taken
        for _ in range(4):
            envs.step([0, 0])
        whole = np.stack(list(envs.episode_infos.values()))
    nan = np.nan
    # Env 1 ends the restored episode in step 1 and a whole one in step 6; env 0 begins in step 1 and ends in step 4.
    np.testing.assert_array_equal(ends[0], [[nan, 2.5], [nan, nan]])
    np.testing.assert_array_equal(ends[3], [[2.0, nan], [0.0, nan]])
    np.testing.assert_array_equal(ends[5], [[nan, 2.5], [nan, 1.0]])
    np.testing.assert_array_equal(whole, [[nan, 2.5], [nan, 1.0]])


@pytest.mark.parametrize("build", ["single", "batched"])
def test_a_value_that_cannot_be_summed_is_an_error_that_names_env_key_and_value(build):
    fns = [lambda i=i: LabelEnv(i) for i in range(2)]
    if build == "batched":
        fns = vecenv.Batched(
            lambda num_envs, autoreset_mode, fns=fns: gym.vector.SyncVectorEnv(fns, autoreset_mode=autoreset_mode), 2
        )
    with vecenv.SyncVectorEnv(fns, info_keys=["label:sum"]) as envs:
        envs.reset(seed=0)
        with pytest.raises(TypeError, match=r"info 'label' of env 1 at step 1 of its episode is 'done' \(str\)"):
            envs.step([0] * 2)


def test_a_sum_needs_a_key():
    with pytest.raises(ValueError, match="empty or a repeated key"):
        vecenv.SyncVectorEnv(functions(), info_keys=[":sum"])


def test_infos_and_results_do_not_depend_on_the_keys():
    with vecenv.SyncVectorEnv(functions(), info_keys=KEYS) as ours, vecenv.SyncVectorEnv(functions()) as theirs:
        assert_same(ours.reset(seed=0), theirs.reset(seed=0))
        for _ in range(9):
            assert_same(ours.step([0] * 4), theirs.step([0] * 4))


def test_send_and_recv_write_episode_infos():
    with vecenv.AsyncVectorEnv(functions(2, length=1), num_workers=2, info_keys=["nested/score"]) as envs:
        envs.reset(seed=0)
        envs.send([0], [0])
        envs.recv()
        np.testing.assert_array_equal(envs.episode_infos["nested/score"], [1.0, np.nan])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_a_cut_episode_has_no_info(mode):
    how = {"num_workers": 2, "autoreset_mode": mode, "on_worker_death": "restart", "info_keys": ["slashed/name"]}
    with vecenv.AsyncVectorEnv(functions(4, length=2), **how) as envs:
        envs.reset(seed=0)
        for values in envs.arrays.values():
            if values.dtype == np.float64 and values.ndim == 2:
                values[:] = 7.0  # a stale value would show
        envs.step([0] * 4)
        envs.processes[0].kill(), envs.processes[0].join()
        *_, terminated, truncated, _ = envs.step([0] * 4)
        assert (terminated | truncated).tolist() == [True, True, False, True]
        np.testing.assert_array_equal(envs.episode_infos["slashed/name"], [np.nan, np.nan, np.nan, 3])


class LabelEnv(CountingEnv):
    def step(self, action):
        *results, _ = super().step(action)
        return *results, {"label": "done"} if self.index == 1 else {}


@pytest.mark.parametrize("build", ["single", "batched"])
def test_a_value_that_is_not_a_number_is_an_error_that_names_env_key_and_value(build):
    fns = [lambda i=i: LabelEnv(i) for i in range(2)]
    if build == "batched":
        fns = vecenv.Batched(
            lambda num_envs, autoreset_mode, fns=fns: gym.vector.SyncVectorEnv(fns, autoreset_mode=autoreset_mode), 2
        )
    with vecenv.SyncVectorEnv(fns, info_keys=["label"]) as envs:
        envs.reset(seed=0)
        envs.step([0] * 2), envs.step([0] * 2)
        message = r"info 'label' of env 1 at step 3 of its episode is 'done' \(str\), not a real number.*info_keys"
        with pytest.raises(TypeError, match=message):
            envs.step([0] * 2)


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), (np.float64(0.5), 0.5), (np.array([1, 2]), 2.0)])
def test_a_batched_info_without_a_mask_has_a_value_for_every_env(value, expected):
    assert episode_infos.number(episode_infos.find_in_batch({"key": value}, "key", 1)) == expected


def test_an_info_that_is_an_array_gets_no_advice_on_rewards():
    with pytest.raises(TypeError, match=r"not a real number, as info_keys requires$"):
        episode_infos.number(np.array([1.0, 0.0]))


@pytest.mark.parametrize(
    ("keys", "error"), [("is_success", TypeError), ([1], TypeError), (["a", "a"], ValueError), ([""], ValueError)]
)
def test_keys_that_are_not_distinct_names_are_refused(keys, error):
    with pytest.raises(error, match="info_keys"):
        vecenv.SyncVectorEnv(functions(), info_keys=keys)


def test_states_do_not_depend_on_the_keys():
    how = {"autoreset_mode": "SameStep"}
    with (
        vecenv.SyncVectorEnv(functions(), **how) as plain,
        vecenv.SyncVectorEnv(functions(), info_keys=KEYS, **how) as ours,
    ):
        for envs in (plain, ours):
            envs.reset(seed=0)
        for _ in range(3):
            plain.step([0] * 4)
        ours.set_state(plain.get_state())
        assert all(np.isnan(values).all() for values in ours.episode_infos.values())
        assert_same(ours.step([0] * 4)[:4], plain.step([0] * 4)[:4])
        plain.set_state(ours.get_state())


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_mujoco_tasks_in_cpp_have_the_infos_of_gymnasium(mode):
    key, steps = "x_position", 5
    vector = {"autoreset_mode": mode, "infos": False, "info_keys": [key]}
    actions = np.full((3, 6), 0.5, np.float32)
    found = []
    for backend in ("auto", "python"):
        how = {"num_workers": 0, "backend": backend, "max_episode_steps": steps, "vector_kwargs": vector}
        with vecenv.make("HalfCheetah-v5", 3, **how) as envs:
            envs.reset(seed=0)
            found.append([(envs.step(actions), envs.episode_infos[key])[1] for _ in range(2 * steps + 1)])
    np.testing.assert_array_equal(found[0], found[1])
    assert np.isfinite(found[0][steps - 1]).all() and np.isnan(found[0][0]).all()
