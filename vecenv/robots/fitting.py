"""Adapts a robot model, such as Go1 or Go2 from MuJoCo Menagerie, to the task in quadruped.py.

Train it:  python -m ppo train --config quadruped --env-kwargs xml_file=PATH --logdir runs
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mujoco
import numpy as np

from vecenv.mujoco import Model

LEGS = ("FL", "FR", "RL", "RR")
HOME = (0.0, 0.9, -1.8)  # radians of the abduction, hip and knee joints
TORQUES = (23.7, 23.7, 35.55)  # Nm, the limits of these joints in a Go1


def fitted(source: Model, kp: float | None = None) -> mujoco.MjSpec | mujoco.MjModel:
    """Returns an MjSpec with a step of 5 ms, and with a floor, servos, sensors and "home" if the model lacks them.

    Args:
        source: A path or an MjSpec; an MjModel is returned as it is. The robot has a free root joint and twelve hinge
            joints, and the names of the bodies of each leg begin with "FL", "FR", "RL" and "RR".
        kp: Stiffness in Nm/rad of position servos that replace the model's actuators. None: 60 Nm/rad if the model has
            no actuators; otherwise, it keeps them.

    Raises:
        ValueError: If the robot does not have these joints and legs.
    """
    if isinstance(source, mujoco.MjModel):
        return source
    if isinstance(source, mujoco.MjSpec):
        spec = source.copy()
    else:
        spec = mujoco.MjSpec.from_file(str(Path(source).expanduser()))
    model = spec.compile()
    joints = [mujoco.mjtJoint(kind).name.removeprefix("mjJNT_").lower() for kind in model.jnt_type]
    if joints != ["free", *["hinge"] * 12]:
        raise ValueError(f"the robot must have a free root joint and then twelve hinge joints, but it has {joints}")
    feet = [foot_of(model, leg) for leg in LEGS]
    geoms = {geom.id: geom for geom in spec.geoms}  # an edit clears the ids
    spec.option.timestep, spec.option.integrator = 0.005, mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    if model.body_geomnum[0] == 0:
        plane = mujoco.mjtGeom.mjGEOM_PLANE
        spec.worldbody.add_geom(name="floor", type=plane, size=[0, 0, 0.1], contype=1, conaffinity=1)
    if kp or model.nu == 0:
        replace_actuators(spec, model.jnt_range[1:], kp or 60.0)
    add_sensors(spec, [geoms[foot] for foot in feet])
    if spec.key("home") is None:
        data = mujoco.MjData(model)
        data.qpos[:3], data.qpos[7:] = 0, HOME * 4
        mujoco.mj_kinematics(model, data)
        data.qpos[2] = (model.geom_rbound[feet] - data.geom_xpos[feet, 2]).max()  # all feet are above the floor
        spec.add_key(name="home", qpos=data.qpos)
    return spec


def replace_actuators(spec: mujoco.MjSpec, ranges: np.ndarray, kp: float) -> None:
    """Replaces a robot's actuators with position servos, one per joint, of these ranges (rad) and gain (Nm/rad)."""
    for actuator in list(spec.actuators):
        spec.delete(actuator)
    for joint, limits, torque in zip(spec.joints[1:], ranges, TORQUES * 4, strict=True):
        joint.armature = joint.armature or 0.01  # of a motor with its gear
        servo = spec.add_actuator(name=joint.name, target=joint.name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        servo.gear, servo.ctrlrange, servo.forcerange = [1, 0, 0, 0, 0, 0], limits, [-torque, torque]
        servo.set_to_position(kp=kp, kv=kp / 40)


def foot_of(model: mujoco.MjModel, leg: str) -> int:
    """Returns a leg's foot: the id of the colliding geom of its last body that is farthest from the body's origin."""
    bodies = [body for body in range(model.nbody) if model.body(body).name.startswith(leg)]
    geoms = np.flatnonzero(
        (model.geom_bodyid == max(bodies, default=-1)) & (model.geom_contype | model.geom_conaffinity > 0)
    )
    if len(geoms) == 0:
        raise ValueError(
            f"the model has no leg {leg}: the names of the bodies of each leg must begin with {', '.join(LEGS)}, and "
            "the last of them must have a geom that collides, the foot"
        )
    return geoms[np.linalg.norm(model.geom_pos[geoms], axis=1).argmax()]


def add_sensors(spec: mujoco.MjSpec, feet: Sequence[mujoco.MjsGeom]) -> None:
    """Adds the sensors that the task reads: motion and tilt of the base, contacts and motion of the feet."""
    sensor, obj = mujoco.mjtSensor, mujoco.mjtObj
    if spec.site("root") is None:
        spec.joints[0].parent.add_site(name="root", pos=[0, 0, 0])
    root = {"objtype": obj.mjOBJ_SITE, "objname": "root"}
    world = {"objtype": obj.mjOBJ_BODY, "objname": "world"}
    sensors = {
        "gyro": {"type": sensor.mjSENS_GYRO, **root},
        "velocity": {"type": sensor.mjSENS_VELOCIMETER, **root},
        "up": {"type": sensor.mjSENS_FRAMEZAXIS, **world, "reftype": root["objtype"], "refname": "root"},
    }
    for leg, foot in zip(LEGS, feet, strict=True):
        foot.name = foot.name or f"{leg}_foot"
        foot.priority = max(foot.priority, 1)  # so that its friction counts, and not the floor's
        on_foot = {"objtype": obj.mjOBJ_GEOM, "objname": foot.name}
        with_world = {"reftype": world["objtype"], "refname": "world", "intprm": [1, 0, 1]}  # 1: "found"
        sensors[f"{leg}_contact"] = {"type": sensor.mjSENS_CONTACT, **on_foot, **with_world}
        sensors[f"{leg}_velocity"] = {"type": sensor.mjSENS_FRAMELINVEL, **on_foot}
    for name, fields in sensors.items():
        if spec.sensor(name) is None:
            spec.add_sensor(name=name, **fields)
