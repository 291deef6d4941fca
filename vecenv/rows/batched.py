"""Batched: envs that are stepped all in one call, by a vector env that each worker builds for its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

MakeVectorEnv = Callable[..., VectorEnv]
"""`make(num_envs=n, autoreset_mode=mode)`."""


class Batched:
    """Stands for a list of `num_envs` env functions where one function builds many envs at once.

    Pass it to `AsyncVectorEnv` or `SyncVectorEnv` in place of the list: each worker then builds one vector env for
    its run of envs, steps it in one call, and writes what it returns into the memory of its rows.

    Args:
        make: Called as `make(num_envs=n, autoreset_mode=mode)`; returns a vector env of n envs. It must take a list
            of seeds, reset as its `metadata["autoreset_mode"]` says (with `SAME_STEP` giving `infos["final_obs"]`),
            and heed `options["reset_mask"]`, if masks are to be used. What a step returns is the caller's from then
            on: the vector env must not write there again. With `num_groups`, threads step several of them at once, so a
            step must not write to what their class or module owns. If it has `step_rows(ids, actions)` too, as
            `vecenv.mujoco.MujocoVectorEnv` has, then `send`, `recv` and `on_worker_death="restart"` work as well. For
            vecenv's `get_state` it needs a `get_state()` of its own that returns a list of one plain state for each
            env, and a `set_state(states)` that takes it.
        num_envs: N.

    Example:
        >>> import vecenv
        >>> from vecenv.mujoco import Hopper
        >>> with vecenv.AsyncVectorEnv(vecenv.Batched(Hopper, 16), num_workers=2) as envs:  # one thread each
        ...     observations, infos = envs.reset(seed=0)
        >>> observations.shape
        (16, 11)
    """

    def __init__(self, make: MakeVectorEnv, num_envs: int):
        if not callable(make):
            raise TypeError(f"make={make!r} is not a function: it must build a vector env of num_envs envs")
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: there must be 1 or more")
        self.make = make
        self.num_envs = num_envs

    def __len__(self) -> int:
        return self.num_envs

    def __getitem__(self, rows: slice) -> Batched:
        """Returns the same for a run of the envs."""
        return Batched(self.make, len(range(self.num_envs)[rows]))

    def build(self, autoreset_mode: AutoresetMode) -> VectorEnv:
        """Returns the vector env.

        Raises:
            TypeError, ValueError: If it is none, or not what was asked for.
        """
        env: Any = self.make(num_envs=self.num_envs, autoreset_mode=autoreset_mode)
        if not isinstance(env, VectorEnv):
            raise TypeError(f"make() returned a {type(env).__name__}, but must return a gymnasium.vector.VectorEnv")
        if env.num_envs != self.num_envs:
            raise ValueError(f"make(num_envs={self.num_envs}) returned a vector env of {env.num_envs} envs")
        mode = env.metadata.get("autoreset_mode")
        if mode != autoreset_mode:
            raise ValueError(
                f"make(autoreset_mode={autoreset_mode}) returned a vector env whose metadata['autoreset_mode'] is "
                f"{mode}: build the vecenv with autoreset_mode={mode}, or make one that resets as it is told"
            )
        return env
