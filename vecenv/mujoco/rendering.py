"""BatchRenderer: frames of single simulations of a batch, rendered by Gymnasium's own renderer."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import mujoco
import numpy as np
from gymnasium import logger
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

from vecenv.errors import RenderingFailed, in_one_line
from vecenv.mujoco.physics import Physics
from vecenv.opengl import ADVICE, backends, why_not

RENDER_MODES = ["human", "rgb_array", "depth_array", "rgbd_tuple"]
DEFAULT_SIZE = 480  # pixels, as in Gymnasium's MujocoEnv
OPTIONS = {"width", "height", "camera_id", "camera_name", "default_camera_config", "max_geom", "visual_options"}


class BatchRenderer:
    """Renders any env of a batch, in a mode of Gymnasium's MujocoRenderer. Each rendered env has its own camera.

    Args:
        physics: The simulations, built with `whole=True` if there is a render mode.
        render_mode: One of `RENDER_MODES`, or None if nothing will be rendered.
        options: Values for any of `OPTIONS`, which replace Gymnasium's defaults.
        follows: Whether the camera shows or follows the robot if no option sets a camera.

    Raises:
        ValueError: If the render mode is unknown, or an option has an invalid value.
        TypeError: If an option is unknown, or has a value of the wrong type.
    """

    def __init__(self, physics: Physics, render_mode: str | None, options: dict[str, Any], *, follows: bool):
        if render_mode not in (None, *RENDER_MODES):
            raise ValueError(f"render_mode={render_mode!r} is unknown: use None or one of {RENDER_MODES}")
        for name in options:
            if name not in OPTIONS:
                raise TypeError(f"got an unexpected keyword argument '{name}'")
        _check_options(physics.model, options)
        self._physics, self._mode, self._options = physics, render_mode, options
        cameras = ("default_camera_config", "camera_id", "camera_name")
        self._follows = follows and all(options.get(name) is None for name in cameras)
        self._renderers: dict[int, tuple[MujocoRenderer, mujoco.MjModel, mujoco.MjData]] = {}
        model = physics.model
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, options.get("width", DEFAULT_SIZE))
        model.vis.global_.offheight = max(model.vis.global_.offheight, options.get("height", DEFAULT_SIZE))

    def render(self, env: int) -> Any:
        """Returns a frame of one simulation, or raises RenderingFailed if no OpenGL backend works on this machine."""
        renderer, model, data = self._prepared(env)
        if self._physics.varied:
            self._physics.batch.get_model(env, model)
        self._physics.batch.get_data(env, data)
        if renderer.viewer is not None:
            return renderer.render(self._mode)
        if "tensorflow" in sys.modules:
            logger.warn(
                "TensorFlow is loaded in this process, so Mesa's OpenGL (used without a GPU) may crash with SIGSEGV. "
                "If it does, render in a worker process: vecenv.make(..., num_workers=1)"
            )
        failures = []
        for backend in backends():
            try:
                with _environment(MUJOCO_GL=backend):
                    return renderer.render(self._mode)
            except Exception as error:  # each OpenGL library raises its own exception types
                if renderer.viewer is not None:  # the backend works
                    raise
                reason = why_not(backend) if backend else None
                failures.append(f"{backend or 'the default'}: {reason or in_one_line(error)}")
        raise RenderingFailed(
            f"env {env} cannot be rendered, because no OpenGL backend works: "
            f"{'; '.join(failures) or 'none found'}. {ADVICE}"
        )

    def renderer(self, env: int) -> MujocoRenderer:
        """Returns Gymnasium's renderer of one simulation."""
        return self._prepared(env)[0]

    def _prepared(self, env: int) -> tuple[MujocoRenderer, mujoco.MjModel, mujoco.MjData]:
        """Returns the renderer of a simulation, its model and its data, or raises ValueError without a render mode."""
        if self._mode is None:
            raise ValueError("render() needs a render mode: build the envs with render_mode='rgb_array'")
        if env not in self._renderers:
            batch = self._physics.batch
            model, data = batch.get_model(env) if self._physics.varied else self._physics.model, batch.get_data(env)
            options = {"width": DEFAULT_SIZE, "height": DEFAULT_SIZE, **self._options}
            options["default_cam_config"] = options.pop("default_camera_config", None)
            if self._follows:
                options["default_cam_config"] = _default_camera(model, data)
            renderer = MujocoRenderer(model, data, **options)
            if self._follows:
                renderer.camera_id = None  # otherwise, Gymnasium replaces the camera of the config by a free one
            self._renderers[env] = renderer, model, data
        return self._renderers[env]

    def close(self) -> None:
        """Closes all renderers."""
        while self._renderers:
            self._renderers.popitem()[1][0].close()


def _check_options(model: mujoco.MjModel, options: dict[str, Any]) -> None:
    """Raises if Gymnasium's renderer would reject an option, or MuJoCo would end the process because of it."""
    for size in ("width", "height", "max_geom"):
        if not isinstance(value := options.get(size, 1), (int, np.integer)) or value < 1:
            raise ValueError(f"{size}={value!r}: it must be a positive integer")
    flags = mujoco.MjvOption().flags
    for flag, value in (options.get("visual_options") or {}).items():
        try:
            flags[flag] = value
        except (IndexError, TypeError, ValueError):
            where = f"visual_options={options['visual_options']!r}"
            raise ValueError(f"{where}: it must map members of mujoco.mjtVisFlag to 0 or 1") from None
    cameras = [model.camera(i).name for i in range(model.ncam)]
    name, number = options.get("camera_name"), options.get("camera_id")
    if name is not None and name not in cameras:
        raise ValueError(f"the model has no camera {name!r}: its cameras are {cameras}")
    if number is not None and number not in range(-1, model.ncam):
        raise ValueError(f"camera_id={number!r}: it must be from -1 to {model.ncam - 1}")
    config = options.get("default_camera_config")
    if config is not None:
        _check_camera(model, config, cameras)


def _check_camera(model: mujoco.MjModel, config: Any, cameras: list[str]) -> None:
    """Raises if the attributes of a camera that replace MuJoCo's defaults are not valid for a model."""
    where, camera = "default_camera_config (or the class attribute `camera`)", mujoco.MjvCamera()
    if not isinstance(config, dict):
        raise TypeError(
            f"{where} is {config!r}, but must be a dict of attributes of mujoco.MjvCamera, such as "
            f'{{"distance": 2.0, "lookat": [0, 0, 0.3]}}. To use a camera of the model, whose cameras are {cameras}, '
            "pass camera_name"
        )
    attributes = [name for name in dir(camera) if not name.startswith("_")]
    for key, value in config.items():
        if key not in attributes:
            raise ValueError(f"{where} has the unknown key {key!r}: use {', '.join(attributes)}")
        try:
            if isinstance(value, np.ndarray):
                getattr(camera, key)[:] = value
            else:
                setattr(camera, key, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where} has an invalid {key}: {value!r}") from None
    of_type = {mujoco.mjtCamera.mjCAMERA_TRACKING: ("trackbodyid", model.nbody)}
    of_type[mujoco.mjtCamera.mjCAMERA_FIXED] = ("fixedcamid", model.ncam)
    for kind, (key, count) in of_type.items():
        if camera.type == kind and getattr(camera, key) not in range(count):
            raise ValueError(f"{where} has an invalid {key}: {getattr(camera, key)}, which is not in {range(count)}")


def _default_camera(model: mujoco.MjModel, data: mujoco.MjData) -> dict[str, Any] | None:
    """Returns the config of a camera that shows the robot, or None if nothing in the model can move.

    The robot consists of the kinematic trees that have actuators, or is the first tree if none has. A robot that can
    leave its place is followed. Otherwise, the camera shows everything within the robot's reach.
    """
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if camera >= 0:
        return {"type": mujoco.mjtCamera.mjCAMERA_FIXED, "fixedcamid": camera}
    if model.ntree == 0:
        return None
    mujoco.mj_fwdPosition(model, data)
    actuated = data.moment_colind[: data.moment_rownnz.sum()]
    trees = np.unique(model.dof_treeid[actuated]) if len(actuated) else np.array([0])
    bases = model.tree_bodyadr[trees]
    base = int(bases[0])
    joints = model.jnt_type[model.jnt_bodyid == base]
    if np.isin(joints, (mujoco.mjtJoint.mjJNT_FREE, mujoco.mjtJoint.mjJNT_SLIDE)).any():
        geoms = model.body_rootid[model.geom_bodyid] == model.body_rootid[base]
        distances = np.linalg.norm(data.geom_xpos[geoms] - data.xpos[base], axis=1) + model.geom_rbound[geoms]
        config = {"type": mujoco.mjtCamera.mjCAMERA_TRACKING, "trackbodyid": base}
        config |= {"lookat": data.subtree_com[base].copy(), "distance": 4 * distances.max(initial=0.25)}
        return config | {"azimuth": 120.0, "elevation": -20.0}
    center = data.xpos[bases].mean(axis=0)
    geoms = np.isin(model.body_treeid[model.geom_bodyid], trees)
    bodies = model.geom_bodyid[geoms]
    distances = np.linalg.norm(data.xpos[model.tree_bodyadr[model.body_treeid[bodies]]] - center, axis=1)
    distances += _reaches(model)[bodies] + np.linalg.norm(model.geom_pos[geoms], axis=1) + model.geom_rbound[geoms]
    # At 3 times its radius, a ball fits into MuJoCo's default field of view.
    config = {"lookat": center, "distance": 3 * distances.max(initial=0.0) or model.stat.extent}
    return config | {"azimuth": model.vis.global_.azimuth, "elevation": model.vis.global_.elevation}


def _reaches(model: mujoco.MjModel) -> np.ndarray:
    """Returns how far each body can be from the first body of its tree, whatever its joints do: float64[nbody]."""
    reaches = np.linalg.norm(model.body_pos, axis=1)
    slides = model.jnt_type == mujoco.mjtJoint.mjJNT_SLIDE
    np.add.at(reaches, model.jnt_bodyid[slides], np.abs(model.jnt_range[slides]).max(axis=1))
    reaches[model.body_weldid == 0] = reaches[model.tree_bodyadr] = 0.0
    for body, parent in enumerate(model.body_parentid):
        reaches[body] += reaches[parent]
    return reaches


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Sets environment variables inside the block, then restores them and PYOPENGL_PLATFORM, which backends set."""
    before = {name: os.environ.get(name) for name in (*variables, "PYOPENGL_PLATFORM")}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
