"""The robots of vecenv.robots stand, are the same with any number of workers, and can be replaced by others."""

import mujoco
import numpy as np
import pytest

import vecenv
from tests.helpers import assert_same
from vecenv.robots.fitting import LEGS
from vecenv.robots.quadruped import MODEL, WEIGHTS, Quadruped
from vecenv.testing import check_vector_env

QUADRUPED = "vecenv.robots:Quadruped-v0"


def test_the_quadruped_is_the_same_with_any_number_of_workers_and_after_a_saved_state():
    def steps_of(envs, count, start=0):
        actions = [np.sin(np.arange(60).reshape(5, 12) + t / 3).astype(np.float32) for t in range(start, start + count)]
        return tuple(envs.step(action) for action in actions)

    results, how = [], {"max_episode_steps": 40}
    for num_workers in (0, 1, 2):
        with vecenv.make(QUADRUPED, 5, num_workers=num_workers, **how) as envs:
            assert envs.num_workers == num_workers
            first, _ = envs.reset(seed=3)
            early, states = steps_of(envs, 70), envs.get_state()
            results.append((first, early, steps_of(envs, 60, start=70)))
    assert_same(*results[:2])
    assert_same(*results[1:])
    with vecenv.make(QUADRUPED, 5, num_workers=2, **how) as envs:
        envs.set_state(states)
        assert_same(steps_of(envs, 60, start=70), results[0][2])
    check_vector_env(lambda: Quadruped(3, max_episode_steps=20))


def infos_of_standing(envs):
    """Checks that two robots with the command 0 stand still for two seconds; returns the infos of the last step."""
    envs.reset(seed=0)
    envs.commands[:] = 0
    for _ in range(100):
        _, _, terminated, _, infos = envs.step(np.zeros((2, 12), np.float32))
        assert not terminated.any()
    assert envs.contacts().all() and (infos["error/velocity"] < 0.1).all() and (infos["error/yaw"] < 0.1).all()
    return infos


def test_the_quadruped_has_the_size_of_a_go1_and_stands():
    envs = Quadruped(2, randomized=False, noise=0.0)
    assert 12 < envs.model.body_mass.sum() < 13 and envs.dt == 0.02
    infos = infos_of_standing(envs)
    terms = {key.removeprefix("return/") for key in infos if key.startswith("return/")}
    assert terms == set(WEIGHTS)
    with pytest.raises(ValueError, match=r"unknown terms \['velocty'\]; the terms are tracking_lin_vel, "):
        Quadruped(2, reward_weights={"velocty": 2.0})


def go1(actuator="", end=""):
    """Returns a model with the names, joints and masses of Go1 in MuJoCo Menagerie, without floor and sensors."""
    legs, actuators = "", ""
    for leg, x, y in (("FR", 1, -1), ("FL", 1, 1), ("RR", -1, -1), ("RL", -1, 1)):
        legs += f"""
        <body name="{leg}_hip" pos="{x * 0.188} {y * 0.047} 0">
          <joint name="{leg}_hip_joint" axis="1 0 0" range="-0.863 0.863"/>
          <geom name="{leg}_hip_collision" size="0.05" mass="0.68"/>
          <body name="{leg}_thigh" pos="0 {y * 0.08} 0">
            <joint name="{leg}_thigh_joint" range="-0.686 4.501"/>
            <geom type="capsule" size="0.015" fromto="0 0 0 0 0 -0.2" mass="1"/>
            <body name="{leg}_calf" pos="0 0 -0.213">
              <joint name="{leg}_calf_joint" range="-2.818 -0.888"/>
              <geom type="box" size="0.01 0.01 0.3" pos="0 0 -0.3" contype="0" conaffinity="0" mass="0"/>
              <geom type="capsule" size="0.01" fromto="0 0 0 0 0 -0.2" mass="0.15"/>
              <geom size="0.023" pos="0 0 -0.213" mass="0.05"/>
              <site name="{leg}" pos="0 0 -0.213"/>
            </body>
          </body>
        </body>"""
        for joint in ("hip", "thigh", "calf") if actuator else ():
            actuators += f'<{actuator} name="{leg}_{joint}" joint="{leg}_{joint}_joint"/>'
    return f"""
    <mujoco model="go1"><compiler angle="radian" autolimits="true"/>
      <default><geom contype="1" conaffinity="0"/><joint axis="0 1 0"/></default>
      <worldbody>
        <body name="trunk" pos="0 0 0.445"><freejoint/><site name="imu" pos="-0.02 -0.07 0"/>
        <geom type="box" size="0.13 0.09 0.05" mass="5.2"/>{legs}</body>
      </worldbody>
      <actuator>{actuators}</actuator>
      <sensor><gyro name="imu_ang_vel" site="imu"/></sensor>{end}
    </mujoco>"""


HOME = """
<keyframe><key name="home" qpos="0 0 0.27 1 0 0 0 0 0.9 -1.8 0 0.9 -1.8 0 0.9 -1.8 0 0.9 -1.8"
  ctrl="0 0.9 -1.8 0 0.9 -1.8 0 0.9 -1.8 0 0.9 -1.8"/></keyframe>"""


@pytest.mark.parametrize(
    ("model", "kwargs", "stiffness"),
    [
        (go1(), {}, 60),
        (go1(end='<option timestep="0.002" cone="elliptic" impratio="100"/>'), {"kp": 40}, 40),
        (go1('position kp="100" kv="2"', HOME), {}, 100),
        (go1("motor", HOME).replace("<default>", '<default><motor ctrlrange="-9 9" gear="3"/>'), {"kp": 80}, 80),
    ],
    ids=["bare", "options", "servos", "motors"],
)
def test_a_robot_from_elsewhere_stands_on_its_feet_and_can_be_stepped_by_workers(model, kwargs, stiffness, tmp_path):
    (tmp_path / "go1.xml").write_text(model)
    envs = Quadruped(2, xml_file=tmp_path / "go1.xml", randomized=False, noise=0.0, **kwargs)
    assert envs.dt == 0.02 and (envs.model.actuator_biasprm[:, 1] == -stiffness).all()
    assert (envs.model.actuator_gear[:, 0] == 1).all()
    assert [envs.model.body(envs.model.geom_bodyid[foot]).name for foot in envs.feet] == [f"{leg}_calf" for leg in LEGS]
    assert (envs.model.geom_rbound[envs.feet] == 0.023).all()
    infos_of_standing(envs)
    results = []
    for num_workers in (0, 1):
        with vecenv.make(QUADRUPED, 2, num_workers=num_workers, xml_file=str(tmp_path / "go1.xml"), **kwargs) as envs:
            first = envs.reset(seed=3)
            results.append((first, *(envs.step(np.full((2, 12), np.sin(t), np.float32)) for t in range(5))))
    assert_same(*results)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (go1("motor"), "has 0 position actuators among its 12 actuators.*kp=60"),
        (go1('velocity kv="1"'), "has 0 position actuators among its 12 actuators.*kp=60"),
        (go1().replace("FL_", "LF_"), "no leg FL: the names of the bodies of each leg must begin with FL, FR, RL, RR"),
        (go1().replace("<freejoint/>", ""), r"must have a free root joint.*but it has \['hinge', "),
        (go1().replace('<joint name="RL_calf_joint" range="-2.818 -0.888"/>', ""), "must have .* twelve hinge joints"),
    ],
    ids=["motors", "velocity", "legs", "root", "joints"],
)
def test_the_error_for_a_robot_that_does_not_fit_says_what_it_lacks(model, message):
    with pytest.raises(ValueError, match=message):
        Quadruped(2, xml_file=mujoco.MjSpec.from_string(model))


def test_a_compiled_model_is_used_as_it_is():
    model = mujoco.MjModel.from_xml_path(str(MODEL))
    assert Quadruped(2, xml_file=model).model.nsite == model.nsite
    with pytest.raises(KeyError, match=r"the model has no sensor 'gyro'; its names are .*'imu_ang_vel'"):
        Quadruped(2, xml_file=mujoco.MjModel.from_xml_string(go1('position kp="60"', HOME)))
