"""`Batched`: stands for many env functions when one function builds many envs at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

ADVICE = "If you need single envs, build them from a list of functions, or with vecenv.make(..., backend='python')."


class Batched:
    """Stands for `num_envs` env functions when one function builds many envs at once.

    Pass it to `AsyncVectorEnv` or `SyncVectorEnv` instead of a list of functions. Each worker builds one vector env
    for its range of envs, steps it in one call, and writes the results to the memory of its rows.

    The vector env must
    - accept `seed=None` in `reset`, and a list that holds one seed or None for each env;
    - reset its envs as `metadata["autoreset_mode"]` says, with the last observations in `infos["final_obs"]` if the
      mode is `SAME_STEP`;
    - honor `options["reset_mask"]`, `bool[n]`, if you use masks or `on_worker_death="restart"`;
    - return infos in Gymnasium's format: an array `[n, ...]` under each key and its mask `bool[n]` under `_key`.

    It may also define
    - `step_rows(ids, actions)`, which steps some of its envs and returns rows for all of them: required by `send`,
      `recv` and `on_worker_death="restart"`;
    - a keyword argument `out` of both `step(actions, out=...)` and `reset(seed=..., options=..., out=...)`: arrays
      `[n, ...]`, nested like the observation space, that the vector env fills with its observations and returns
      instead of new arrays, which saves a copy. With `float32_observations=True`, they are float32 instead of float64;
    - `hands_over_infos`, True if it returns a new dict of new arrays in each call, which the engine may pass on without
      checks and copies;
    - `drop_infos()`, which is called once if the engine needs no infos; later infos may hold only `final_obs`;
    - `get_state()`, which returns a list of one plain state per env, and `set_state(states)`: required by the methods
      of the same name.

    `vecenv.mujoco.MujocoVectorEnv` defines all of these. A wrapper must define them itself, because Gymnasium's
    `VectorWrapper` does not forward them.

    Args:
        make: Called as `make(num_envs=n, autoreset_mode=mode)`; returns a vector env of n envs.
        num_envs: N.

    Example:
        >>> import vecenv
        >>> from vecenv.mujoco import Hopper
        >>> with vecenv.AsyncVectorEnv(vecenv.Batched(Hopper, 16), num_workers=2) as envs:  # one thread each
        ...     observations, infos = envs.reset(seed=0)
        >>> observations.shape
        (16, 11)
    """

    def __init__(self, make: Callable[..., VectorEnv], num_envs: int):
        if not callable(make):
            raise TypeError(f"make={make!r} is not a function: it must build a vector env of num_envs envs")
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: it must be 1 or more")
        self.make = make
        self.num_envs = num_envs

    def __len__(self) -> int:
        return self.num_envs

    def __getitem__(self, rows: slice) -> Batched:
        """Returns the `Batched` for a run of the envs."""
        return Batched(self.make, len(range(self.num_envs)[rows]))

    def build(self, autoreset_mode: AutoresetMode) -> VectorEnv:
        """Returns the vector env.

        Raises:
            TypeError: If `make` returns anything else.
            ValueError: If the vector env has another number of envs or another autoreset mode.
        """
        env: Any = self.make(num_envs=self.num_envs, autoreset_mode=autoreset_mode)
        if not isinstance(env, VectorEnv):
            raise TypeError(f"make() returned a {type(env).__name__}, but must return a gymnasium.vector.VectorEnv")
        mode, fault = env.metadata.get("autoreset_mode"), None
        if env.num_envs != self.num_envs:
            fault = f"make(num_envs={self.num_envs}) returned a vector env of {env.num_envs} envs"
        elif mode != autoreset_mode:
            fault = (
                f"make(autoreset_mode={autoreset_mode}) returned a vector env whose metadata['autoreset_mode'] is "
                f"{mode}: pass autoreset_mode={mode} to vecenv, or return a vector env that honors the argument"
            )
        if fault is not None:
            env.close()
            raise ValueError(fault)
        return env
