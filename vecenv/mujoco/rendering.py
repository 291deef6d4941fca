"""rendering.py: BatchRenderer: frames of single simulations of a batch, by Gymnasium's own renderer."""

from __future__ import annotations

from typing import Any

import mujoco
from mujoco.batch import Batch

DEFAULT_SIZE = 480  # pixels, as of Gymnasium's MujocoEnv


class BatchRenderer:
    """Renders any env of a batch.

    Args:
        model: Of the simulations.
        batch: The simulations.
        render_mode: Of Gymnasium's MujocoRenderer; None if nothing is to be rendered.
        options: `width`, `height`, `camera_id`, `camera_name`, `default_camera_config`, `max_geom`, `visual_options`.

    Raises:
        TypeError: If there is another option, as Gymnasium's envs do.
    """

    def __init__(self, model: mujoco.MjModel, batch: Batch, render_mode: str | None, options: dict[str, Any]):
        known = {"width", "height", "camera_id", "camera_name", "default_camera_config", "max_geom", "visual_options"}
        for name in options:
            if name not in known:
                raise TypeError(f"got an unexpected keyword argument '{name}'")
        self._model, self._batch, self._mode, self._options = model, batch, render_mode, options
        self._renderer: Any = None
        self._data: mujoco.MjData | None = None
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, options.get("width", DEFAULT_SIZE))
        model.vis.global_.offheight = max(model.vis.global_.offheight, options.get("height", DEFAULT_SIZE))

    def render(self, env: int) -> Any:
        """Returns a frame of one simulation.

        Raises:
            ValueError: If no render_mode was chosen.
        """
        if self._mode is None:
            raise ValueError("nothing can be rendered without render_mode: build the envs with render_mode='rgb_array'")
        if self._renderer is None:
            from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

            self._data = mujoco.MjData(self._model)
            options = {"width": DEFAULT_SIZE, "height": DEFAULT_SIZE, **self._options}
            self._renderer = MujocoRenderer(self._model, self._data, **options)
        self._batch.get_data(env, self._data)
        return self._renderer.render(self._mode)

    def close(self) -> None:
        """Lets go of the renderer, if there is one."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
