"""Tests of vecenv/mujoco beyond lockstep equality: custom tasks, contact forces, the clock, and partial batches."""

import copy
import functools
import os
import re
import warnings

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.mujoco_env import expand_model_path
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import assert_same
from vecenv import Batched
from vecenv.mujoco import Ant, HalfCheetah, Hopper, Humanoid, MujocoVectorEnv
from vecenv.mujoco.contacts import with_listed_contacts
from vecenv.mujoco.physics import Physics
from vecenv.testing import RuleBroken, check_vector_env


class Task(Hopper):
    """Hoppers whose methods return the values in `returns`."""

    def __init__(self, num_envs=4, returns=None, **kwargs):
        self.returns = returns or {}
        super().__init__(num_envs, **kwargs)

    def begin(self, ids, rngs):
        super().begin(ids, rngs)
        self.data.qpos[ids] += self.returns.get("begin", 0)

    def observe(self):
        return self.returns.get("observe", super().observe())

    def outcome(self, before, actions):
        rewards, terminated, infos = super().outcome(before, actions)
        return self.returns.get("outcome", (rewards, terminated, {**infos, **self.returns.get("infos", {})}))


ZEROS = np.zeros((4, 3), np.float32)
rewards, terminated = np.zeros(4), np.zeros(4, bool)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ({"observe": np.zeros((1, 11))}, r"Task\.observe\(\) must return float64\[N, M\]"),
        ({"observe": np.zeros(4)}, r"Task\.observe\(\) must return float64\[N, M\]"),
        ({"observe": None}, r"Task\.observe\(\) must return"),
        (
            {"outcome": (np.zeros(1), terminated, {})},
            r"Task\.outcome\(\) must return rewards float64\[N\], here \(4,\)",
        ),
        ({"outcome": (rewards, np.zeros(4, int), {})}, r"must return terminated bool\[N\].*it returned int64\[4\]"),
        ({"outcome": (rewards, np.zeros(4), {})}, r"must return terminated bool\[N\].*it returned float64\[4\]"),
        (
            {"outcome": (rewards, terminated)},
            r"Task\.outcome\(\) must return \(rewards, terminated, infos\) or \(rewards,",
        ),
        ({"outcome": (rewards, terminated, None)}, r"Task\.outcome\(\) must return infos as a dict; it returned None"),
        ({"outcome": (rewards, {}, terminated)}, r"Task\.outcome\(\) must return infos as a dict; it returned array"),
        (
            {"observe": [[1.0, 2.0], [3.0], [4.0], [5.0]]},
            r"Task\.observe\(\) must return.*it returned no array: .*inhomogeneous",
        ),
        (
            {"observe": (np.ones((4, 3)), np.ones((4, 2)))},
            r"must return float64\[N, M\].*it returned a tuple of 2 arrays",
        ),
        ({"outcome": None}, r"Task\.outcome\(\) must return .*; it returned None"),
        ({"infos": {"speed": np.zeros(2)}}, r"info 'speed' \[N, ...\] with N=4; it returned float64\[2\]"),
        ({"infos": {"speed": 3.0}}, r"info 'speed' \[N, ...\] with N=4; it returned float64\[\]"),
        ({"infos": {"speed": {"x": 1}}}, r"info 'speed'.*it returned object"),
        ({"infos": {3: np.zeros(4)}}, r"Task\.outcome\(\) must return infos whose keys are strings; it returned \[3\]"),
        ({"begin": np.array([[0]] * 3 + [[np.nan]])}, r"Task\.begin\(\) gave NaN in data\.qpos for its env 3"),
    ],
)
def test_an_invalid_result_of_a_task_is_an_error_that_names_the_method_and_the_shape(returns, message):
    with pytest.raises((ValueError, TypeError), match=message):
        envs = Task(returns=returns)
        envs.reset(seed=0)
        envs.step(ZEROS)


def test_observations_that_the_space_of_a_task_cannot_hold_are_an_error():
    envs = Task()
    envs.single_observation_space = gym.spaces.Box(0, 255, (2,), np.uint8)
    for values, fits in ((200.0, True), (300.0, False), (0.5, False), (-1, False)):
        envs.returns = {"observe": np.full((4, 2), values)}
        if fits:
            assert envs.reset(seed=0)[0].tolist() == [[200, 200]] * 4
        else:
            with pytest.raises(ValueError, match=r"Task\.observe\(\) must return .* that uint8 cannot hold"):
                envs.reset(seed=0)


class Misspelled(Task):
    def observe(self):
        return self.data.qvl


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_first_observation_names_the_envs(num_workers):
    """It comes from the spaces, which are computed when they are first used."""
    with pytest.raises(AttributeError, match="qvl") as caught:
        vecenv.AsyncVectorEnv(Batched(Misspelled, 4), num_workers=num_workers)
    assert re.search(
        "envs 0:4.* during construction", "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    )


def test_a_task_needs_actions_that_are_arrays_and_a_render_mode_that_exists():
    envs = Task()
    envs.single_action_space = gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (3,)))
    envs.reset(seed=0)
    with pytest.raises(TypeError, match=r"Task has the action space Dict\(.*, but its actions must be arrays"):
        envs.step({"a": ZEROS})
    with pytest.raises(ValueError, match="render_mode='rgb_array_list' is unknown: use None or one of"):
        Task(render_mode="rgb_array_list")


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_info_whose_name_begins_with_an_underscore_is_kept(mode):
    numbers = np.arange(4.0)
    build = functools.partial(Task, returns={"infos": {"_hidden": numbers}}, max_episode_steps=3)
    with vecenv.SyncVectorEnv(Batched(build, 4), autoreset_mode=mode, info_keys=("_hidden",), infos=False) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(ZEROS)
        np.testing.assert_array_equal(envs.episode_infos["_hidden"], numbers)


def test_the_error_for_a_missing_method_names_the_method():
    class Empty(MujocoVectorEnv):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define observe\(\)"):
        Empty(2, xml_file="hopper.xml", frame_skip=4)


@pytest.mark.parametrize("hook", ["initial_state(rng)", "randomize(env, rng)"])
def test_the_error_for_a_hook_of_earlier_versions_names_its_successor(hook):
    with pytest.raises(TypeError, match=f"Old defines {re.escape(hook)}: define begin\\(ids, rngs\\) instead"):
        type("Old", (Hopper,), {hook.partition("(")[0]: lambda self, *arguments: None})(2)


def test_results_belong_to_the_caller_even_if_the_task_returns_its_own_arrays():
    """A task may return its own buffers and views of data that the next step changes."""
    own = {"rewards": np.zeros(4), "terminated": np.zeros(4, bool)}

    class Keeping(Hopper):
        def observe(self):
            return self.data.qpos

        def outcome(self, before, actions):
            own["rewards"] += 1
            return own["rewards"], own["terminated"], {"height": self.data.qpos[:, 1], "mine": own["rewards"]}

    for envs in (Keeping(4), vecenv.AsyncVectorEnv(vecenv.Batched(Keeping, 4), num_workers=0)):
        first, _ = envs.reset(seed=0)
        kept = copy.deepcopy((first, envs.step(ZEROS)))
        envs.step(ZEROS)
        own["rewards"][:] = 0
        first, _ = envs.reset(seed=0)
        result = (first, envs.step(ZEROS))
        for _ in range(3):
            envs.step(ZEROS + 1)
        assert_same(result, kept)
        assert result[1][2] is not own["terminated"]
        own["rewards"][:] = 0
        envs.close()


class Heavy(Humanoid):
    """The second humanoid's torso has twice the mass."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.physics.expand("body_mass")[1, 1] *= 2
        self.physics.batch.set_const()


def test_rewards_depend_on_the_masses_of_each_humanoid():
    envs = Heavy(2)
    actions = np.full((2, 17), 0.1, np.float32)
    envs.reset(seed=0)
    found = [envs.step(actions) for _ in range(5)]
    for i in range(2):
        single = gym.make("Humanoid-v5").unwrapped
        single.model.body_mass[1] *= 1 + i
        mujoco.mj_setConst(single.model, mujoco.MjData(single.model))
        single.reset(seed=i)
        for step in found:
            observation, reward, _, _, info = single.step(actions[i])
            np.testing.assert_array_equal(step[0][i], observation)
            assert step[1][i] == reward and step[4]["x_velocity"][i] == info["x_velocity"]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_contact_forces_after_a_reset_equal_gymnasiums_if_a_sensor_needs_them(tmp_path, mode):
    with open(expand_model_path("humanoidstandup.xml")) as file:
        text = file.read()
    at = text.index(">", text.index('<body name="torso"')) + 1
    text = f'{text[:at]}<site name="here"/>{text[at:]}'
    text = text.replace("</mujoco>", '<sensor><accelerometer site="here"/></sensor></mujoco>')
    model = tmp_path / "sensing.xml"
    model.write_text(text)
    kwargs = {"xml_file": str(model), "max_episode_steps": 7}
    fns = [lambda: gym.make("HumanoidStandup-v5", **kwargs)] * 3
    theirs = gym.vector.SyncVectorEnv(fns, autoreset_mode=mode)
    with vecenv.make("HumanoidStandup-v5", 3, vector_kwargs={"autoreset_mode": mode}, **kwargs) as ours:
        assert isinstance(ours._pool.envs[0], MujocoVectorEnv)
        first, _ = ours.reset(seed=0)
        assert_same(first, theirs.reset(seed=0)[0])
        theirs.action_space.seed(0)
        for _ in range(6 if mode == AutoresetMode.DISABLED else 20):
            actions = theirs.action_space.sample()
            assert_same(ours.step(actions), theirs.step(actions))


def test_the_memory_order_of_actions_does_not_change_any_bit():
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 8))
    one, other = Ant(5), Ant(5)
    one.reset(seed=0), other.reset(seed=0)
    assert_same(one.step(np.asfortranarray(actions)), other.step(actions))


@pytest.mark.parametrize("steps", [0, -5, 2.5, "3"])
def test_an_invalid_time_limit_is_an_error(steps):
    with pytest.raises((ValueError, TypeError), match="max_episode_steps"):
        vecenv.make("Hopper-v5", 2, max_episode_steps=steps)
    with pytest.raises(ValueError, match=r"max_episode_steps=.*positive integer"):
        Hopper(2, max_episode_steps=steps)


def test_a_missing_body_is_an_error():
    with pytest.raises(IndexError):
        Ant(2, main_body=-1)


def test_islands_are_disabled_only_in_models_with_one_tree(tmp_path):
    flag = mujoco.mjtDisableBit.mjDSBL_ISLAND
    bodies = "<body pos='{} 0 1'><joint type='slide'/><geom size='0.1'/></body>"
    for count, sleep in ((1, ""), (2, ""), (1, "<option><flag sleep='enable'/></option>")):
        trees = "".join(bodies.format(i) for i in range(count))
        model = tmp_path / f"{count}{bool(sleep)}.xml"
        model.write_text(f"<mujoco>{sleep}<worldbody>{trees}</worldbody></mujoco>")
        physics = Physics(str(model), 2, num_threads=1, fields=(), whole=False)
        assert bool(physics.model.opt.disableflags & flag) == (count == 1 and not sleep)


def test_the_clock_is_disabled_only_during_steps():
    envs = Humanoid(2)
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
    step = mujoco.mjtTimer.mjTIMER_STEP
    assert envs.physics.batch.get_data(0).timer[step].duration == 0
    data = mujoco.MjData(envs.model)
    mujoco.mj_step(envs.model, data, 100)
    assert data.timer[step].duration > 0


def test_the_environment_variable_sets_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert HalfCheetah(4).physics.batch.nthread == 3
    assert HalfCheetah(4, num_threads=1).physics.batch.nthread == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert HalfCheetah(4).physics.batch.nthread == os.cpu_count()


def test_copying_a_task_is_an_error():
    with pytest.raises(TypeError, match="Hopper cannot be copied or pickled"):
        copy.deepcopy(Hopper(2))


def test_the_envs_remain_usable_after_a_step_before_the_first_reset():
    with vecenv.make("Hopper-v5", 2) as envs:
        with pytest.raises(gym.error.ResetNeeded):
            envs.step(np.zeros((2, 3), np.float32))
        envs.reset(seed=0)
        envs.step(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_attribute_is_the_same_for_all_envs_even_if_it_is_a_tuple(num_workers):
    with vecenv.make("Reacher-v5", 4, num_workers=num_workers) as envs:
        assert envs.get_attr("fields") == (("xpos",),) * 4
        envs.reset(seed=3)
        assert envs.get_attr("np_random_seed") == (3, 4, 5, 6)


@pytest.mark.parametrize(
    ("mode", "build"),
    [
        pytest.param(mode, build, marks=pytest.mark.slow if build == 2 and mode != AutoresetMode.SAME_STEP else ())
        for mode in AutoresetMode
        for build in ("serial", 0, 2)
    ],
)
def test_send_and_recv_return_the_same_as_lockstep(mode, build):
    """The schedule has random subsets, mixed action dtypes, buffers overwritten after `send`, and episode ends."""
    batched = vecenv.Batched(lambda **how: Hopper(max_episode_steps=12, **how), 4)
    if build == "serial":
        ours = vecenv.SyncVectorEnv(batched, autoreset_mode=mode)
    else:
        ours = vecenv.AsyncVectorEnv(batched, num_workers=build, autoreset_mode=mode)
    singles = [Hopper(1, max_episode_steps=12, autoreset_mode=mode) for _ in range(4)]
    rng = np.random.default_rng(0)
    with ours:
        ours.reset(seed=0)
        over = np.zeros(4, bool)
        for i, single in enumerate(singles):
            single.reset(seed=i)
        for _ in range(60):
            if mode == AutoresetMode.DISABLED and over.any():
                ours.reset(options={"reset_mask": over})
                for i in np.flatnonzero(over):
                    singles[i].reset()
            order, actions = rng.permutation(4), {}
            for part in np.split(order, [rng.integers(1, 4)]):
                batch = rng.uniform(-1, 1, (len(part), 3)).astype(rng.choice([np.float32, np.float64]))
                actions |= {i: batch[k].copy() for k, i in enumerate(part)}
                ours.send(batch, part)
                batch[:] = 9
            got = ours.recv()
            for k, i in enumerate(got.env_ids):
                observation, reward, terminated, truncated, infos = singles[i].step(actions[i][None])
                assert_same(got.observations[k], observation[0])
                assert got.rewards[k] == reward[0] and got.terminated[k] == terminated[0]
                assert got.truncated[k] == truncated[0]
                over[i] = terminated[0] | truncated[0]
                if "_x_position" in infos and infos["_x_position"][0]:
                    assert got.infos["x_position"][k] == infos["x_position"][0]
                if "final_obs" in infos:
                    assert_same(got.infos["final_obs"][k], infos["final_obs"][0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_masked_resets_during_episodes_equal_gymnasiums(num_workers):
    theirs = gym.vector.SyncVectorEnv([lambda: gym.make("Hopper-v5")] * 4)
    with vecenv.make("Hopper-v5", 4, num_workers=num_workers) as ours:
        assert_same(ours.reset(seed=0), theirs.reset(seed=0))
        rng = np.random.default_rng(1)
        theirs.action_space.seed(0)
        for _ in range(60):
            actions = theirs.action_space.sample()
            assert_same(ours.step(actions), theirs.step(actions))
            mask = rng.random(4) < 0.2
            if mask.any():
                how = {"seed": [7, None, 8, None], "options": {"reset_mask": mask, "other": 1}}
                expected = theirs.reset(**copy.deepcopy(how))[0]
                np.testing.assert_array_equal(ours.reset(**how)[0][mask], expected[mask])
    theirs.close()


@pytest.mark.parametrize("name", ["SameStep", "SAME_STEP"])
def test_an_autoreset_mode_may_be_a_members_name_or_value(name):
    assert Task(autoreset_mode=name).metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    with vecenv.make("Hopper-v5", 2, vector_kwargs={"autoreset_mode": name}) as envs:
        assert envs.autoreset_mode == AutoresetMode.SAME_STEP


def test_the_caller_may_change_its_actions_after_step_async():
    with vecenv.make("Hopper-v5", 2) as ours, vecenv.make("Hopper-v5", 2) as theirs:
        ours.reset(seed=0), theirs.reset(seed=0)
        actions = np.full((2, 3), 0.5)  # float64, unlike the action space
        ours.step_async(actions)
        actions[:] = -1
        assert_same(ours.step_wait(), theirs.step(np.full((2, 3), 0.5)))


TIE = '<equality><connect body1="low" body2="high" anchor="0 0 0"/></equality>'


@pytest.mark.parametrize(("height", "tie", "push"), [(0.1, "", 0.0), (9, "", 0.0), (9, "", 3.0), (9, TIE, 0.0)])
def test_contact_forces_equal_mujocos_whatever_causes_them(tmp_path, height, tie, push):
    bodies = "".join(
        f'<body name="{name}" pos="0 0 {z}" gravcomp="{z - height}"><freejoint/><geom size="0.1"/></body>'
        for name, z in (("low", height), ("high", height + 1))
    )
    file = tmp_path / "two.xml"
    file.write_text(f'<mujoco><worldbody><geom type="plane" size="9 9 1"/>{bodies}</worldbody>{tie}</mujoco>')
    physics = Physics(str(file), 3, num_threads=1, fields=(), whole=True)
    physics.batch.bind("xfrc_applied")[1, 2, :3] = push
    physics.step(2)
    forces = np.full((3, 3, 6), np.nan)
    physics.write_contact_forces(np.arange(3), forces)

    model = mujoco.MjModel.from_xml_path(str(file))
    for i, pushed in enumerate([0.0, push, 0.0]):
        data = mujoco.MjData(model)
        data.xfrc_applied[2, :3] = pushed
        mujoco.mj_step(model, data, 2)
        mujoco.mj_rnePostConstraint(model, data)
        assert_same(forces[i], data.cfrc_ext)
        assert data.cfrc_ext.any() == bool(height < 1 or tie or pushed)


class WarningSpec:
    """A model specification whose compilation also warns about something else."""

    def __init__(self, spec):
        self._spec = spec

    def __getattr__(self, name):
        return getattr(self._spec, name)

    def compile(self):
        warnings.warn("the mass matrix is singular", stacklevel=2)
        return self._spec.compile()


def test_only_the_warning_about_gymnasiums_model_file_is_silenced():
    """MuJoCo warns that `settotalmass`, which half_cheetah.xml contains, is deprecated."""
    spec = mujoco.MjSpec.from_file(expand_model_path("half_cheetah.xml"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with_listed_contacts(WarningSpec(spec))
    assert {str(warning.message) for warning in seen} == {"the mass matrix is singular"}


ROBOT = """
<mujoco><option timestep="0.005"/><worldbody><geom name="floor" type="plane" size="5 5 0.1"/>
<body name="trunk" pos="0 0 0.2"><freejoint/><geom type="box" size="0.1 0.1 0.05"/><site name="imu"/>
<body name="leg" pos="0.1 0 0"><joint name="hip" axis="0 1 0"/>
<geom name="foot" type="capsule" fromto="0 0 0 0.2 0 -0.1" size="0.02"/></body></body></worldbody>
<actuator><position name="hip" joint="hip" kp="5" kv="0.3" ctrlrange="-1 1"/></actuator>
<sensor><gyro name="gyro" site="imu"/><accelerometer name="acceleration" site="imu"/>
<contact name="contact" geom1="foot" geom2="floor" data="found force" reduce="netforce"/></sensor>
<keyframe><key name="high" qpos="0 0 0.5 1 0 0 0 0.3" qvel="0 0 0 0 0 1 0" ctrl="0.4"/></keyframe></mujoco>
"""


class Robot(MujocoVectorEnv):
    """Follows commands with noisy sensors. `returns` replaces what its methods return."""

    fields = ("xfrc_applied",)
    saved = ("commands", "last", "noise")

    def __init__(self, num_envs=3, returns=None, **kwargs):
        spec = mujoco.MjSpec.from_string(ROBOT)
        super().__init__(num_envs, **{"xml_file": spec, "frame_skip": 4, "max_episode_steps": 12, **kwargs})
        self.replaced = returns or {}
        self.single_action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.gyro = self.data.sensor("gyro").data
        self.foot = self.data.sensor("contact").data
        self.friction = self.physics.expand("geom_friction")
        self.commands, self.last, self.noise = np.zeros((num_envs, 2)), np.zeros((num_envs, 2)), np.zeros((num_envs, 3))

    def begin(self, ids, rngs):
        self.data.qpos[ids, -1:] += rngs.uniform(-0.3, 0.3, 1)
        self.friction[ids, :, 0] = rngs.uniform(0.3, 1.0, 1)
        self.commands[ids], self.noise[ids] = rngs.uniform(-1, 1, 2), rngs.standard_normal(3)
        self.last[ids] = 0

    def apply(self, actions):
        return self.replaced.get("apply", 0.1 + 0.5 * actions[:, :1])

    def after_step(self, ids, actions, rngs):
        self.last[ids], self.noise[ids] = actions, rngs.standard_normal(3)
        due = rngs.random() < 0.2
        self.commands[ids[due]] = rngs[due].uniform(-1, 1, 2)
        self.data.qvel[ids[due], :2] += rngs[due].uniform(-0.2, 0.2, 2)
        self.data.xfrc_applied[ids, 1, 2] = rngs.uniform(0, 3)

    def observe(self):
        policy = np.concatenate([self.gyro + 0.1 * self.noise, self.commands, self.last], axis=1, dtype=np.float32)
        return self.replaced.get("observe", {"policy": policy, "critic": {"foot": self.foot, "qvel": self.data.qvel}})

    def outcome(self, before, actions):
        terms = {"upward": 2 * self.data.qvel[:, 2], "effort": -np.square(actions).sum(axis=1)}
        high = self.data.qpos[:, 2] > 0.3
        infos = {"seen": self.gyro[:, 0], "seen_speed": terms["upward"]}
        return self.replaced.get("terms", terms), high, self.data.qpos[:, 7] > 0.6, infos


def steps_of(build, count=60, mode=AutoresetMode.NEXT_STEP):
    """Returns the results of a reset and of some steps, with a mask of the envs that began for DISABLED."""
    rng = np.random.default_rng(0)
    with build() as envs:
        found = [envs.reset(seed=5)]
        for _ in range(count):
            found.append(envs.step(rng.uniform(-1, 1, (envs.num_envs, 2)).astype(np.float32)))
            over = found[-1][2] | found[-1][3]
            if mode == AutoresetMode.DISABLED and over.any():
                found.append(envs.reset(options={"reset_mask": over}))
    return tuple(found)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_events_noise_and_histories_do_not_depend_on_the_number_of_workers_nor_on_saved_states(mode):
    def build(num_workers):
        return vecenv.AsyncVectorEnv(vecenv.Batched(Robot, 5), num_workers=num_workers, autoreset_mode=mode)

    expected = steps_of(lambda: build(0), mode=mode)
    assert sum(step[3].sum() for step in expected if len(step) == 5) > 10
    assert_same(steps_of(lambda: build(2), mode=mode), expected)
    assert_same(
        steps_of(lambda: vecenv.SyncVectorEnv(vecenv.Batched(Robot, 5), autoreset_mode=mode), mode=mode), expected
    )


def test_envs_that_step_at_different_times_equal_single_envs():
    singles, rng = [Robot(1) for _ in range(4)], np.random.default_rng(0)
    with vecenv.AsyncVectorEnv(vecenv.Batched(Robot, 4), num_workers=0) as envs:
        envs.reset(seed=0)
        for i, single in enumerate(singles):
            single.reset(seed=i)
        for _ in range(60):
            ids = np.flatnonzero(rng.random(4) < 0.6)
            actions = rng.uniform(-1, 1, (len(ids), 2)).astype(np.float32)
            if len(ids):
                envs.send(actions, ids)
                got = envs.recv(len(ids))
            for k, i in enumerate(ids):
                observation, reward, _, truncated, infos = singles[i].step(actions[k][None])
                assert_same(got.observations["policy"][k], observation["policy"][0])
                assert got.rewards[k] == reward[0] and got.truncated[k] == truncated[0]
                if "return/upward" in infos:
                    assert got.infos["return/upward"][k] == infos["return/upward"][0]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_rules_for_vector_envs_hold_for_a_task_with_every_hook(mode):
    check_vector_env(lambda: Robot(3, autoreset_mode=mode))


class Careless(Robot):
    """Writes all rows of one array in `begin`, although only the episodes of `ids` begin."""

    saved = Robot.saved

    def __init__(self, num_envs, field, **kwargs):
        self.field = field
        super().__init__(num_envs, **kwargs)

    def begin(self, ids, rngs):
        super().begin(ids, rngs)
        if self.field == "commands":
            self.commands[:] = 0
        else:  # only later observations depend on it
            self.data.qpos[:] = self.init_qpos

    def outcome(self, before, actions):
        rewards, terminated, _, infos = super().outcome(before, actions)
        return rewards, np.zeros_like(terminated), infos


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("field", ["commands", "qpos"])
@pytest.mark.parametrize("num_workers", [None, 0])
def test_a_task_that_changes_other_rows_in_begin_breaks_the_rule_about_masks(num_workers, field, mode):
    def build(num_envs=3, autoreset_mode=mode):
        return Careless(num_envs, field, autoreset_mode=autoreset_mode)

    def make():
        how = {"num_workers": num_workers, "autoreset_mode": mode}
        return build() if num_workers is None else vecenv.AsyncVectorEnv(Batched(build, 3), **how)

    with pytest.raises(RuleBroken, match=r"does not change the envs outside the mask(?s:.*)`begin` of a MuJoCo task"):
        check_vector_env(make)


def test_a_saved_state_continues_with_noise_commands_and_returns():
    envs, others = Robot(), Robot()
    envs.reset(seed=0)
    for _ in range(7):
        envs.step(np.full((3, 2), 0.3))
    others.set_state(envs.get_state())
    assert_same(others.observe(), envs.observe())
    for _ in range(20):
        assert_same(others.step(np.full((3, 2), -0.2)), envs.step(np.full((3, 2), -0.2)))


@pytest.mark.parametrize("whole", [False, True])
def test_positions_and_velocities_are_current_and_forces_are_those_of_the_last_substep(whole):
    class Current(Robot):
        fields = ("sensordata", "xpos", "xfrc_applied")
        with_contact_forces = whole

        def after_step(self, ids, actions, rngs):
            pass

    class Stale(Current):
        current = False

    envs, stale = Current(), Stale()
    for each in (envs, stale):
        each.reset(seed=0)
    touched = 0
    for _ in range(30):
        assert_same(*(each.step(np.full((3, 2), 0.9))[1:4] for each in (envs, stale)))
        assert_same(envs.data.qpos, stale.data.qpos)
        found, force = envs.foot[:, 0] > 0, envs.foot[:, 1]  # along the normal
        touched += found.sum()
        assert ((force > 0) == found).all()
    assert_same(envs.cfrc_ext, stale.cfrc_ext)
    for name in ("acceleration", "contact"):
        assert_same(envs.data.sensor(name).data, stale.data.sensor(name).data)
    assert touched > 10
    for i in range(3):
        data, model = envs.physics.batch.get_data(i), envs.physics.batch.get_model(i)
        mujoco.mj_forward(model, data)
        assert_same(envs.gyro[i], data.sensor("gyro").data)
        assert_same(envs.data.body("leg").xpos[i], data.body("leg").xpos)
        assert np.abs(stale.gyro[i] - envs.gyro[i]).max() > 1e-6


@pytest.mark.parametrize("whole", [False, True])
def test_rays_measure_distances_and_do_not_change_the_simulations(whole):
    class Seeing(Robot):
        with_contact_forces = whole

    envs, others = Seeing(keyframe="high"), Seeing(keyframe="high")
    for each in (envs, others):
        each.reset(seed=0)
    for _ in range(3):
        origins = envs.data.qpos[:, None, :3] - [0, 0, 0.1]
        distances, geoms = envs.physics.batch.ray(origins, [0, 0, -1.0])
        np.testing.assert_allclose(distances[:, 0], envs.data.qpos[:, 2] - 0.1)
        assert (geoms == envs.model.geom("floor").id).all()
        assert_same(*(each.step(np.full((3, 2), 0.4)) for each in (envs, others)))


def test_rays_that_may_be_those_of_each_simulation_or_of_all_are_an_error():
    envs = Robot()
    envs.reset(seed=0)
    ray, down = envs.physics.batch.ray, [0, 0, -1.0]
    origins = envs.data.qpos[:, :3] - [0, 0, 0.1]
    with pytest.raises(ValueError, match=r"origins of rays have shape \(3, 3\).*origins\[:, None\].*origins\[None\]"):
        ray(origins, down)
    with pytest.raises(ValueError, match=r"directions of rays have shape \(2, 3\)"):
        ray(origins[:, None], [down, down])
    assert ray(origins[:, None], down)[0].shape == (3, 1)
    assert ray(origins[None], down)[0].shape == (3, 3) and ray(origins[0], down)[0].shape == (3, 1)


def test_a_named_view_writes_the_model_of_each_env():
    envs = Robot()
    envs.data.body("trunk").mass = np.array([[1.0], [2.0], [3.0]])
    assert (envs.physics.varied["body_mass"][:, 1] == [1, 2, 3]).all()
    envs.reset(seed=0)  # computes the constants that depend on masses
    assert [envs.physics.batch.get_model(i).body_subtreemass[0] > 1 + i for i in range(3)] == [True] * 3


def test_apply_controls_each_substep():
    class Alternating(Robot):
        def apply(self, actions):
            return np.repeat(actions[:, None, :1], self.frame_skip, axis=1) * np.array([1, -1, 1, 0.5])[:, None]

    envs, model = Alternating(keyframe="high"), mujoco.MjModel.from_xml_string(ROBOT)
    envs.reset(seed=0)
    data = envs.physics.batch.get_data(1)
    model.geom_friction[:] = envs.friction[1]
    for control in (0.8, -0.8, 0.8, 0.4):
        data.ctrl[0] = control
        mujoco.mj_step(model, data)
    envs.step(np.full((3, 2), 0.8))
    np.testing.assert_array_equal(envs.data.qpos[1], data.qpos)


@pytest.mark.parametrize("kind", ["spec", "model", "path"])
def test_a_model_is_copied_and_episodes_begin_at_a_keyframe(kind, tmp_path):
    file = tmp_path / "robot.xml"
    file.write_text(ROBOT)
    spec, model = mujoco.MjSpec.from_string(ROBOT), mujoco.MjModel.from_xml_string(ROBOT)
    envs = Robot(xml_file={"spec": spec, "model": model, "path": file}[kind], keyframe="high")
    assert envs.init_qpos[2] == 0.5 and envs.init_qvel[5] == 1 and envs.data.ctrl[0, 0] == 0.4
    assert not model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_ISLAND
    observations, _ = envs.reset(seed=0)
    assert (envs.data.qpos[:, 2] == 0.5).all() and (observations["critic"]["qvel"][:, 5] == 1).all()
    for _ in range(3):
        envs.step(np.zeros((3, 2)))
    envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert (envs.data.qpos[:, 2] == 0.5).tolist() == [False, True, False]


def test_a_name_of_a_model_without_a_folder_that_may_mean_a_file_in_the_current_folder_is_not_silent(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("robot.xml", "hopper.xml"):
        (tmp_path / name).write_text(ROBOT)
    with pytest.raises(OSError, match=r"Gymnasium has no model 'robot\.xml'\. For a file .* pass './robot\.xml'"):
        Robot(xml_file="robot.xml")
    with pytest.raises(OSError, match=r"\./nope\.xml does not exist"):
        Robot(xml_file="./nope.xml")
    with pytest.warns(UserWarning, match=r"'hopper\.xml' is Gymnasium's model.* pass './hopper\.xml'"):
        assert Hopper(1, xml_file="hopper.xml").model.nq == 6
    with warnings.catch_warnings(action="error"):
        assert Robot(xml_file="./robot.xml").model.nq == 8


def test_reward_terms_are_added_up_and_summed_over_the_episode():
    envs = Robot(4)
    envs.reset(seed=0)
    sums, resets = np.zeros((2, 4)), 0
    for _ in range(40):
        _, rewards, _, _, infos = envs.step(np.full((4, 2), 0.5))
        stepped = envs.steps > 0  # the other envs have just begun an episode
        resets += (~stepped).sum()
        if not stepped.any():  # infos have no keys without values
            sums[:] = 0
            continue
        terms = np.stack([infos["seen_speed"], np.full(4, -0.5)])
        np.testing.assert_array_equal(rewards, np.where(stepped, terms.sum(axis=0), 0.0))
        sums = np.where(stepped, sums + terms, 0.0)
        np.testing.assert_array_equal(infos["return/upward"], sums[0])
        np.testing.assert_array_equal(infos["return/effort"], sums[1])
    assert resets > 4


def test_dict_observations_reach_the_engine_in_the_tasks_dtypes_or_as_float32():
    space = Robot().single_observation_space
    assert space["policy"].dtype == np.float32 and space["critic"]["qvel"].dtype == np.float64
    batched = vecenv.Batched(Robot, 3)
    how = {"autoreset_mode": "SameStep"}
    expected = steps_of(lambda: vecenv.AsyncVectorEnv(batched, num_workers=0, **how))
    given = steps_of(lambda: vecenv.AsyncVectorEnv(batched, num_workers=2, float32_observations=True, **how))
    ends = 0
    for one, other in zip(expected[1:], given[1:], strict=True):
        assert_same(other[0]["critic"]["foot"], one[0]["critic"]["foot"].astype(np.float32))
        for i in np.flatnonzero(one[2] | one[3]):
            ends += 1
            final = one[4]["final_obs"][i]
            assert final["critic"]["qvel"].shape == (7,) and (final["policy"] != one[0]["policy"][i]).any()
    assert ends > 5


NAN = np.array([0.0, np.nan, 0.0])
INFINITE = np.array([0.0, -np.inf, 0.0])


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ({"apply": np.zeros((3, 2))}, r"Robot\.apply\(\) must return controls float64\[N, nu\].*here \(3, 1\); it"),
        ({"apply": None}, r"Robot\.apply\(\) must return controls .*; it returned None$"),
        ({"apply": NAN[:, None]}, r"Robot\.apply\(\) gave NaN in the controls for its env 1"),
        ({"terms": {"up": np.zeros((3, 1))}}, r"must return the reward term 'up' as float64\[N\], here \(3,\)"),
        ({"terms": {"up": np.zeros(3), "down": NAN}}, r"gave NaN in the reward term 'down' for its env 1"),
        ({"terms": NAN}, r"Robot\.outcome\(\) gave NaN in the rewards for its env 1"),
        ({"apply": INFINITE[:, None]}, r"Robot\.apply\(\) gave an infinite value in the controls for its env 1"),
        (
            {"terms": {"up": np.zeros(3), "down": INFINITE}},
            r"gave an infinite value in the reward term 'down' .* env 1",
        ),
        ({"terms": INFINITE}, r"Robot\.outcome\(\) gave an infinite value in the rewards for its env 1: -inf"),
        (
            {"observe": {"critic": {"foot": INFINITE[:, None]}}},
            r"infinite value in .*\['critic'\]\['foot'\] for its env 1",
        ),
        ({"observe": {"policy": NAN[:, None]}}, r"gave NaN in observation\['policy'\] for its env 1"),
        ({"observe": {"policy": np.zeros(3)}}, r"observe\(\)\['policy'\] must return float64\[N, M\], not \[3\]"),
        ({"observe": {"policy": None}}, r"observe\(\)\['policy'\] must return float64\[N, M\]"),
        ({"observe": {}}, r"Robot\.observe\(\) must return float64\[N, M\]"),
    ],
)
def test_an_invalid_array_of_a_task_is_an_error_that_names_the_term_and_the_env(returns, message):
    with pytest.raises(ValueError, match=message):
        envs = Robot(returns=returns)
        envs.reset(seed=0)
        envs.step(np.zeros((3, 2)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("hook", "name"),
    [
        ("after_step", "qpos"),
        ("after_step", "qvel"),
        ("after_step", "xfrc_applied"),
        ("begin", "ctrl"),
        ("begin", "geom_friction"),
    ],
)
def test_an_invalid_number_that_a_hook_writes_to_a_simulation_is_an_error_that_names_the_env(hook, name, value):
    """MuJoCo would reset such a simulation, and go on."""

    class Broken(Robot):
        def begin(self, ids, rngs):
            super().begin(ids, rngs)
            self.spoil("begin")

        def after_step(self, ids, actions, rngs):
            super().after_step(ids, actions, rngs)
            self.spoil("after_step")

        def spoil(self, called):
            values = self.friction if name == "geom_friction" else getattr(self.data, name)
            if called == hook:
                values[np.array(self.np_random_seed) == 11] = value

    found = "NaN" if np.isnan(value) else "an infinite value"
    message = rf"Broken\.{hook}\(\) gave {found} in .*{name} for its env 1"
    envs = vecenv.AsyncVectorEnv(vecenv.Batched(Broken, 3), num_workers=0)
    with envs, pytest.raises(ValueError, match=message) as caught:
        envs.reset(seed=10)
        envs.step(np.zeros((3, 2), np.float32))
    assert [note.split(" during ")[0] for note in caught.value.__notes__] == ["raised by env 1"]


class Ball(MujocoVectorEnv):
    saved = ()

    def __init__(self, options=""):
        model = f"<mujoco>{options}<worldbody><body><freejoint/><geom size='1'/></body></worldbody></mujoco>"
        super().__init__(3, xml_file=mujoco.MjSpec.from_string(model), frame_skip=2)

    def observe(self):
        return self.data.qpos

    def outcome(self, before, actions):
        return np.zeros(3), np.zeros(3, bool), {}


def test_a_simulation_that_mujoco_resets_during_a_step_is_an_error_unless_the_model_or_gymnasium_permits_it():
    envs = Ball()
    for field, value in (("qvel", 1e11), ("qpos", -1e11), ("qvel", 1e11)):
        envs.reset(seed=0)
        getattr(envs.data, field)[1, 2] = value
        with pytest.raises(ValueError, match=rf"reset the simulation of env 1 of this Ball .* {field.upper()} .* 2\."):
            envs.step_rows([1, 2], np.zeros((2, 0)))
        envs.reset(seed=0)
        envs.step(np.zeros((3, 0)))
    for permitted in (Ball("<option><flag autoreset='disable'/></option>"), Hopper(3)):
        permitted.reset(seed=0)
        permitted.data.qvel[1, 2] = 1e11
        permitted.step(np.zeros((3, permitted.model.nu)))


def test_invalid_actions_and_states_are_errors_that_name_the_env():
    envs = Robot()
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"action for env 1 of this Robot is NaN or infinite: \[-inf -inf\]"):
        envs.step(np.stack([INFINITE, INFINITE], axis=1))
    with pytest.raises(ValueError, match="actions have dtype <U1, but must be numbers"):
        envs.step(np.full((3, 2), "1"))
    states = envs.get_state()
    states[2]["state"][4] = np.inf
    with pytest.raises(ValueError, match=r"Robot\.set_state\(\) gave an infinite value in data\.qpos for its env 2"):
        Robot().set_state(states)


def test_infos_may_be_nan_where_an_env_has_no_value():
    class Timed(Robot):
        def outcome(self, before, actions):
            return {"up": np.zeros(3)}, np.zeros(3, bool), {"time_to_goal": NAN}

    envs = Timed()
    envs.reset(seed=0)
    assert_same(envs.step(np.zeros((3, 2)))[4]["time_to_goal"], NAN)


@pytest.mark.parametrize("values", [None, 3.0, [0, 0, 0], np.zeros(2)])
def test_a_name_in_saved_without_an_array_of_n_rows_is_an_error_at_the_first_reset(values):
    class Broken(Robot):
        saved = ("commands", "phase")

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.phase = values

    envs = Broken()
    with pytest.raises(ValueError, match=r"Broken\.saved lists 'phase', which must be an array \[N, ...\] with N=3"):
        envs.reset(seed=0)


def test_rewards_of_envs_that_do_not_step_may_be_nan():
    """A task may divide by the number of steps, which is 0 in an env that begins an episode."""
    envs = Robot()
    envs.reset(seed=0)
    for step in range(30):
        with np.errstate(divide="ignore", invalid="ignore"):
            envs.replaced["terms"] = {"mean": (envs.steps - 12) / (envs.steps - 12)}
        rewards = envs.step(np.zeros((3, 2)))[1]
        assert (rewards == (step % 13 != 12)).all()


def test_the_error_for_a_nan_in_a_worker_names_the_env_of_the_engine():
    class Broken(Robot):
        def outcome(self, before, actions):
            return {"speed": np.where(self.np_random_seed == np.array(13), np.nan, 0.0)}, *super().outcome(
                before, actions
            )[1:]

    with vecenv.AsyncVectorEnv(vecenv.Batched(Broken, 5), num_workers=2) as envs:
        envs.reset(seed=10)
        with pytest.raises(vecenv.EnvError, match=r"NaN in the reward term 'speed'(.|\n)*env 3"):
            envs.step(np.zeros((5, 2)))


def test_the_error_for_a_nan_in_a_vector_env_inside_a_single_env_names_the_row_of_that_env():
    spec = EnvSpec("Robot-v0", vector_entry_point=Robot)
    good, bad = (lambda: vecenv.make_single(spec)), (lambda: vecenv.make_single(spec, returns={"terms": NAN[1:2]}))
    with vecenv.AsyncVectorEnv([good, good, bad], num_workers=0) as envs:
        envs.reset(seed=10)
        with pytest.raises(ValueError, match=r"NaN in the rewards for its env 0") as caught:
            envs.step(np.zeros((3, 2), np.float32))
    assert caught.value.__notes__ == ["raised by env 2 during step"]


def test_an_actuator_without_limits_has_an_unbounded_action():
    class Free(MujocoVectorEnv):
        def observe(self):
            return self.data.qpos

    for limits, bound in (("", np.inf), (' ctrlrange="-2 2"', 2)):
        spec = mujoco.MjSpec.from_string(ROBOT.replace(' ctrlrange="-1 1"', limits))
        envs = Free(2, xml_file=spec, frame_skip=4)
        assert envs.single_action_space == gym.spaces.Box(-bound, bound, (1,), np.float32)


def test_views_that_a_task_looks_up_late_have_values_or_are_errors():
    class Late(Robot):
        def observe(self):
            return self.data.body("leg").xpos

    class TooLate(Robot):
        def outcome(self, before, actions):
            return self.data.body("leg").xpos[:, 2], np.zeros(3, bool), {}

    envs = Late(keyframe="high")
    first, _ = envs.reset(seed=0)
    assert first[:, 2].min() > 0
    assert_same(first, envs.reset(seed=0)[0])
    envs = TooLate()
    envs.reset(seed=0)
    with pytest.raises(
        vecenv.StateError, match=r"TooLate looks up data\.xpos for the first time .* in the constructor"
    ):
        envs.step(np.zeros((3, 2)))


def test_the_errors_for_a_missing_name_list_the_names():
    with pytest.raises(KeyError, match=r"the model has no keyframe 'low'; its names are \['high'\]"):
        Robot(keyframe="low")
    with pytest.raises(KeyError, match=r"the model has no sensor 'gyros'; its names are .*'gyro'"):
        Robot().data.sensor("gyros")
    with pytest.raises(AttributeError, match=r"to use data\.mocap_pos, list 'mocap_pos' in .* `fields`"):
        Robot().data.mocap_pos  # noqa: B018
    with pytest.raises(AttributeError, match=r"data has no field or method 'qposs': it has \['actuator', .*'qpos'"):
        Robot().data.qposs  # noqa: B018
    with pytest.raises(ValueError, match="must return arrays nested like"):
        envs = Robot()
        envs.reset(seed=0)
        envs.replaced["observe"] = {"policy": np.zeros((3, 7))}
        envs.step(np.zeros((3, 2)))


@pytest.mark.parametrize("state", ["qpos", "xpos"])
@pytest.mark.parametrize("form", [lambda view: view, lambda view: (3, view), lambda view: {"before": view}])
def test_a_view_that_the_step_would_change_is_an_error(state, form):
    class Viewing(Robot):
        fields = ("xfrc_applied", "xpos")

        def before_step(self):
            return form(self.copied(getattr(self.data, state)))

        def outcome(self, before, actions):
            return np.zeros(3), np.zeros(3, bool), {}

    envs = Viewing()
    envs.reset(seed=0)
    envs.copied = np.asarray
    with pytest.raises(ValueError, match=r"Viewing\.before_step\(\) must return copies"):
        envs.step(np.zeros((3, 2)))
    envs = Viewing()
    envs.reset(seed=0)
    envs.copied = np.copy
    envs.step(np.zeros((3, 2)))


def test_a_method_whose_name_is_nearly_a_hooks_is_a_warning(recwarn):
    class Mixin:
        def before_stp(self): ...

    class Misspelled(Mixin, Robot):
        def after_the_end(self): ...

        def observed(self):  # no mistake, because `observe` is defined
            return self.gyro

        _before_step = begin_goal = observed

    Robot()
    assert not recwarn
    Misspelled()
    message = "Misspelled.before_stp is not called in a step or a reset. Did you mean 'before_step'?"
    assert message in str(recwarn.pop().message)
    assert not recwarn


def test_a_task_may_use_any_private_name():
    own = "_MujocoVectorEnv__"
    private = {
        name.replace(own, "_"): None for name in (*vars(MujocoVectorEnv), *vars(Robot())) if name.startswith(own)
    }
    assert {"_begin", "_step", "_observations", "_checks"} < private.keys()
    task = type("Task", (Robot,), {"saved": Robot.saved, **private})
    vectorized = [
        steps_of(lambda cls=cls: vecenv.AsyncVectorEnv(vecenv.Batched(cls, 3), num_workers=0)) for cls in (task, Robot)
    ]
    assert_same(*vectorized)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<mujoco><worldbody>", r"cannot load the model .*broken\.xml: .*XML"),
        ('<mujoco><actuator><motor joint="elbw"/></actuator></mujoco>', r"cannot load the model .*broken\.xml: .*elbw"),
        (None, r"xml_file='.*broken\.xml' is a folder"),
    ],
)
def test_the_error_for_a_model_that_cannot_be_loaded_names_its_file(text, message, tmp_path):
    file = tmp_path / "broken.xml"
    file.mkdir() if text is None else file.write_text(text)
    with pytest.raises((ValueError, IsADirectoryError), match=message):
        Robot(xml_file=str(file))
