"""ParallelVectorEnv: PettingZoo's envs as a vector env in which each agent has a row.

M envs of K agents are M * K rows of shared memory: row `m * K + k` belongs to agent k of env m. A worker steps whole
envs and receives one message per step, like any other worker.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import Error
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv import tree
from vecenv.adapters import joint_env as keys
from vecenv.adapters.joint_env import AgentGroup, Grouping, JointEnv
from vecenv.ids.specs import import_module
from vecenv.memory import layout
from vecenv.rows.action_spaces import unbounded
from vecenv.rows.arguments import Seeds, autoreset_mode_of, check_functions
from vecenv.rows.infos import batched_infos, columns_of, split_infos
from vecenv.rows.observations import as_float32
from vecenv.tree import Path
from vecenv.vector.async_vector_env import AsyncVectorEnv

__all__ = ["AgentRows", "NamedParallelEnv", "ParallelVectorEnv"]

_FUNCTIONS = ("parallel_env", "env")
"""The functions of PettingZoo's modules, in the order in which they are looked for."""


class NamedParallelEnv:
    """Makes a PettingZoo env from a name. The process that calls it imports the module.

    Args:
        name: "module", whose function `parallel_env` or else `env` makes the env; or "module:function".
        **env_kwargs: Arguments of the function.
    """

    def __init__(self, name: str, **env_kwargs: Any):
        self.name, self.env_kwargs = name, env_kwargs

    def __call__(self) -> Any:
        """Returns a new env. Raises gymnasium.error.Error if the module or the function does not exist."""
        module_name, _, function = self.name.partition(":")
        module = import_module(module_name, f"env {self.name!r}")
        for name in [function] if function else _FUNCTIONS:
            if hasattr(module, name):
                return getattr(module, name)(**self.env_kwargs)
        raise Error(
            f"module {module_name} has no function {function or ' or '.join(_FUNCTIONS)} that makes a PettingZoo "
            'env: name the function, as in "module:function"'
        )


class AgentRows:
    """The rows of a group of K agents in the memory of M envs; `ParallelVectorEnv.groups` holds one for each group.

    Attributes:
        group: The names of the agents and their spaces in the first env.
        num_envs: The number of rows, M * K. Row `m * K + k` belongs to agent k of env m.
        single_observation_space, observation_space, single_action_space, action_space: As in a vector env.
        env_action_space: The action space of one agent, with the bounds that `clip_actions` applies.
        arrays: The memory of these rows: `dtype[S, M * K, *shape]` by path, as in `PooledVectorEnv`, and
            `("valid",)`, `bool[S, M * K]`. Final observations are stored only where the episode of the whole env ended.
            If other agents continue, an agent's last observation is stored as its observation.
    """

    def __init__(
        self,
        joint: AsyncVectorEnv,
        of_envs: Sequence[AgentGroup],
        agents: Sequence[str],
        *,
        clip_actions: bool,
        float32: bool,
    ):
        group = of_envs[0]
        self.group, self._joint, self._agents = group, joint, agents
        self.num_envs = joint.num_envs * len(group.agents)
        observed = [as_float32(each.observation_space) if float32 else each.observation_space for each in of_envs]
        self.single_observation_space = observed[0]
        self.env_action_space = group.action_space
        self.single_action_space = unbounded(group.action_space) if clip_actions else group.action_space
        self.observation_space = tree.batched_space([space for space in observed for _ in group.agents])
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.arrays: dict[Path, np.ndarray] = {
            own: _rows(array) for path, array in joint.arrays.items() if (own := own_path(path, group.name)) is not None
        }
        for flag in (keys.VALID, keys.TERMINATED, keys.TRUNCATED):
            self.arrays[(flag,)] = self.arrays[(flag,)].view(np.bool_)

    @property
    def valid(self) -> np.ndarray:
        """Whether the agent of each row is alive in the newest batch, `bool[M * K]`, a copy.

        In the step that ends an agent's episode, its row holds its last observation and reward, unless the whole env
        has begun its next episode in the same step. In later steps, the row is zero, and actions are ignored.
        """
        return self._newest((keys.VALID,))

    @property
    def episode_returns(self) -> np.ndarray:
        """Each agent's return in its episode so far, or in the one that has just ended: `float64[M * K]`, a copy."""
        return self._newest(layout.EPISODE_RETURN)

    @property
    def episode_lengths(self) -> np.ndarray:
        """The length of each agent's episode so far, or of the one that has just ended: `int64[M * K]`, a copy."""
        return self._newest(layout.EPISODE_LENGTH)

    def _newest(self, path: Path) -> np.ndarray:
        return self.arrays[path][self._joint.newest_slot].copy()

    def _joint_actions(self, actions: Any) -> Any:
        """Returns actions `[M * K, ...]` as `[M, K, ...]`."""

        def leaf(path: Path) -> np.ndarray:
            values = np.asarray(tree.pick(actions, path))
            if values.ndim == 0 or len(values) != self.num_envs:
                raise ValueError(
                    f"{tree.name_of('actions', path)} has shape {values.shape}, but group {self.group.name!r} needs "
                    f"actions for {self.num_envs} agents"
                )
            return values.reshape(self._joint.num_envs, len(self.group.agents), *values.shape[1:])

        return tree.nest(self.single_action_space, leaf)

    def _results(self, joint: Any, infos: Any, over: np.ndarray | None = None) -> tuple[Any, ...]:
        """Returns the result of `reset`, or of a `step` that ended the episodes of the envs in `over`, `bool[M]`.

        `joint` holds the joint observations, and `infos` the info of each env.
        """
        observed, count = joint[self.group.name][keys.OBSERVED], len(self.group.agents)
        observations = tree.nest(self.single_observation_space, lambda path: _rows(tree.pick(observed, path), 0))
        terminated, truncated = self._newest(layout.TERMINATED), self._newest(layout.TRUNCATED)
        ended = terminated | truncated
        if over is None or self._joint.autoreset_mode != AutoresetMode.SAME_STEP:
            ended[:] = False  # there are no final observations
        of_agents: list[tuple[int, dict[str, Any]]] = []
        for row in np.flatnonzero(ended | np.repeat([bool(info) for info in infos], count)).tolist():
            info, agent = infos[row // count], self.group.agents[row % count]
            of_agent = self._info_of(agent, info)
            if final_info := self._info_of(agent, info.get("final_info", {})):
                of_agent["final_info"] = final_info
            if ended[row]:
                of_agent["final_obs"] = self._final_observation(row, over[row // count])  # type: ignore[index]
            if of_agent:
                of_agents.append((row, of_agent))
        merged = batched_infos(columns_of(of_agents), self.num_envs)
        if over is None:
            return observations, merged
        return observations, self._newest(layout.REWARD), terminated, truncated, merged

    def _info_of(self, agent: str, info: dict[str, Any]) -> dict[str, Any]:
        """Returns the info of an agent, with the entries that belong to no agent."""
        others: set[str] = {*self._agents, "final_info", "final_obs"}
        return {**{key: value for key, value in info.items() if key not in others}, **info.get(agent, {})}

    def _final_observation(self, row: int, is_over: bool) -> Any:
        field, slot = layout.FINAL_OBSERVATION if is_over else layout.OBSERVATION, self._joint.newest_slot
        return tree.nest(self.single_observation_space, lambda path: self.arrays[(field, *path)][slot, row, ...].copy())


class JointVectorEnv(AsyncVectorEnv):
    """The vector env of joint envs. If a restarted worker cuts an episode, it marks the agents as truncated."""

    def _mark_cut(self, slot: int, envs: Sequence[int]) -> None:
        """Marks the agents that were alive in the last complete observations of these envs as truncated."""
        rows, same_step = list(envs), self.autoreset_mode == AutoresetMode.SAME_STEP
        last = layout.FINAL_OBSERVATION if same_step else layout.OBSERVATION
        # Owner: the parent, from the end of the step until the workers write these rows again.
        for name in self.single_observation_space:  # type: ignore[attr-defined]  # a Dict
            now = {key: self.arrays[(layout.OBSERVATION, name, key)][slot] for key in keys.RESULTS}
            before = {key: self.arrays[(last, name, key)][slot, rows] for key in keys.RESULTS}
            truncated = before[keys.VALID] != 0
            # With SAME_STEP, the last complete observation may hold the totals of the episode that ended there.
            goes_on = truncated & (before[keys.TERMINATED] == 0) & (before[keys.TRUNCATED] == 0)
            for key in (keys.EPISODE_RETURN, keys.EPISODE_LENGTH):
                now[key][rows] = np.where(goes_on, before[key], 0)
            now[keys.REWARD][rows], now[keys.TERMINATED][rows], now[keys.TRUNCATED][rows] = 0.0, 0, truncated
            if not same_step:
                now[keys.VALID][rows] = 0


class ParallelVectorEnv(VectorEnv):
    """PettingZoo envs in worker processes; each agent of each env has a row.

    Row `m * K + k` belongs to agent k of env m: `reset` and `step` take and return arrays `[M * K, ...]`, or with
    several groups of agents, dicts of such arrays by group. Envs reset as a whole, once no agent is left. An agent
    whose episode ends earlier leaves its row, which is then not `valid` until the agent returns or the env resets. Do
    not train on steps from rows that are not valid.

    Args:
        env_fns: One function per env; each returns a new `pettingzoo.ParallelEnv` or `AECEnv`. PettingZoo converts an
            `AECEnv`: with `aec_to_parallel` if it `is_parallelizable`, otherwise with `turn_based_aec_to_parallel`,
            after which only the agent that moves next affects the env.
        groups: How agents form groups. None: agents with equal spaces. "names": agents with equal spaces and equal
            names apart from their numbers. A dict: the agents of each group.
        state: Whether to add `env.state()` to each observation, under the key "state".
        info_masks: Whether to add the infos' "action_mask" to the observations of groups with discrete actions. None:
            no, and a mask is an error.
        wrap: Wraps each joint env, a Gymnasium env with Dict spaces by group, for example in
            `gymnasium.wrappers.RecordVideo`. A wrapper must not change observations, actions or flags.
        **options: Arguments of `vecenv.AsyncVectorEnv`, such as `num_workers` and `autoreset_mode`. `info_keys` is not
            supported.

    Attributes:
        joint: The `AsyncVectorEnv` of the M joint envs; see `vecenv.adapters.joint_env.JointEnv`.
        num_envs: The number of rows, M * K; with several groups, the sum over the groups.
        groups: The rows of each group, by name.
        agents: The names of all agents.

    Raises:
        EnvError, WorkerDied, StateError: As `vecenv.AsyncVectorEnv` does.
        ValueError: If an agent vanishes without a flag, or a result of a living agent is missing.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from vecenv.adapters.pettingzoo import ParallelVectorEnv
        >>> with ParallelVectorEnv([simple_spread_v3.parallel_env] * 4, num_workers=2) as envs:
        ...     observations, infos = envs.reset(seed=0)
        ...     observations, rewards, terminated, truncated, infos = envs.step([0] * 12)
        >>> observations.shape
        (12, 18)
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        groups: Grouping = None,
        state: bool = False,
        info_masks: bool | None = False,
        wrap: Callable[[gym.Env], gym.Env] | None = None,
        **options: Any,
    ):
        if "info_keys" in options:
            raise TypeError("info_keys is not supported for envs with several agents: omit it")
        mode = autoreset_mode_of(options.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        how = {"groups": groups, "state": state, "info_masks": info_masks, "same_step": mode == AutoresetMode.SAME_STEP}
        makes = [functools.partial(_make_joint, env_fn, how, wrap) for env_fn in check_functions(env_fns)]
        self.joint = JointVectorEnv(makes, **options)
        of_envs = self._agreed_groups()
        clip, float32 = options.get("clip_actions", False), options.get("float32_observations", False)
        self.autoreset_mode = mode
        self.metadata, self.render_mode, self.spec = self.joint.metadata, self.joint.render_mode, None
        self.agents = tuple(agent for group in of_envs[0] for agent in group.agents)
        self.groups = {
            each[0].name: AgentRows(self.joint, each, self.agents, clip_actions=clip, float32=float32)
            for each in zip(*of_envs, strict=True)
        }
        self.num_envs = sum(rows.num_envs for rows in self.groups.values())
        for name in ("single_observation_space", "observation_space", "single_action_space", "action_space"):
            of_groups = {group: getattr(rows, name) for group, rows in self.groups.items()}
            setattr(
                self, name, self.from_groups(of_groups) if len(of_groups) == 1 else spaces.Dict([*of_groups.items()])
            )

    def __enter__(self) -> ParallelVectorEnv:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_workers(self) -> int:
        """The number of worker processes."""
        return self.joint.num_workers

    @property
    def valid(self) -> Any:
        """Whether the agent of each row is alive, `bool[M * K]`; with several groups, a dict of such arrays."""
        return self.from_groups({name: rows.valid for name, rows in self.groups.items()})

    @property
    def over(self) -> np.ndarray:
        """Whether the episode of each env ended in the newest step, `bool[M]`: no agent was left."""
        slot, arrays = self.joint.newest_slot, self.joint.arrays
        return arrays[layout.TERMINATED][slot] | arrays[layout.TRUNCATED][slot]

    @property
    def episode_returns(self) -> Any:
        """The return of each agent's episode so far, `float64[M * K]`; with several groups, a dict of such arrays."""
        return self.from_groups({name: rows.episode_returns for name, rows in self.groups.items()})

    @property
    def episode_lengths(self) -> Any:
        """The length of each agent's episode so far, `int64[M * K]`; with several groups, a dict of such arrays."""
        return self.from_groups({name: rows.episode_lengths for name, rows in self.groups.items()})

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None, timeout: float | None = None
    ) -> tuple[Any, Any]:
        """Resets every env, or the envs in `options["reset_mask"]`; returns observations and infos.

        Args:
            seed: One seed per env, or one number: env m then gets `seed + m`.
            options: Passed to the envs. `reset_mask` is `bool[M]`, or `bool[M * K]` with equal values for all agents of
                an env.
            timeout: Maximum wait in seconds before a multiprocessing.TimeoutError; None for no limit.
        """
        self.joint.reset_async(seed=seed, options=self._with_mask_of_envs(options))
        observations, infos = self.joint.reset_wait(timeout)
        each = split_infos(infos, self.joint.num_envs)
        return self._results([rows._results(observations, each) for rows in self.groups.values()])

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Steps every env; returns observations, float64 rewards, bool terminated and truncated, infos, per agent."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begins the step whose results `step_wait` returns, with actions `[M * K, ...]`, or a dict of these by group.

        Actions for agents that are not alive are ignored, but must have the right shape and dtype.
        """
        of_groups = self.by_group(actions)
        if not isinstance(of_groups, Mapping) or of_groups.keys() != self.groups.keys():
            raise ValueError(f"actions must be a dict with one entry for each of the groups {list(self.groups)}")
        self.joint.step_async({name: rows._joint_actions(of_groups[name]) for name, rows in self.groups.items()})

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, Any]:
        """Waits at most `timeout` seconds for the envs; returns the result of `step`."""
        observations, _, _, _, infos = self.joint.step_wait(timeout)
        each = split_infos(infos, self.joint.num_envs)
        return self._results([rows._results(observations, each, self.over) for rows in self.groups.values()])

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env; returns M results."""
        return self.joint.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns the attribute `name` of every env: M values."""
        return self.joint.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name`. A list or tuple holds one value per env; any other value is for all envs."""
        self.joint.set_attr(name, values)

    def render(self) -> tuple[Any, ...] | None:
        """Returns the result of `render()` of every env: M results."""
        return self.joint.render()

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env; see `AsyncVectorEnv.get_state`. PettingZoo envs must define it themselves."""
        return self.joint.get_state()

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that `get_state` returned."""
        self.joint.set_state(states)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes every env."""
        self.joint.close(**kwargs)

    def by_group(self, values: Any) -> dict[str, Any]:
        """Returns values as a dict by group: the actions of `step`, or one of the results of `reset` or `step`."""
        return {next(iter(self.groups)): values} if len(self.groups) == 1 else values

    def from_groups(self, values: dict[str, Any]) -> Any:
        """Reverses `by_group`: returns the only group's values, or the dict itself if there are several groups."""
        return next(iter(values.values())) if len(self.groups) == 1 else values

    def _results(self, of_groups: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Returns a result of `reset` or `step`, given the results of each group."""
        return tuple(
            self.from_groups(dict(zip(self.groups, part, strict=True))) for part in zip(*of_groups, strict=True)
        )

    def _agreed_groups(self) -> list[tuple[AgentGroup, ...]]:
        """Returns the groups of agents of each env, or closes the joint vector env and raises if they differ."""
        groups = self.joint.apply(lambda env: env.unwrapped.agent_groups)  # type: ignore[attr-defined]  # of a JointEnv
        for env, found in enumerate(groups):
            if _outlines(found) != _outlines(groups[0]):
                self.joint.close()
                raise ValueError(
                    f"env {env} has the agents {[group.agents for group in found]}, by group, but the first env has "
                    f"{[group.agents for group in groups[0]]}: all envs need the same agents in the same order, with "
                    "the same spaces"
                )
        return groups

    def _with_mask_of_envs(self, options: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns the options with a mask of envs in place of a mask of rows."""
        if not options or "reset_mask" not in options:
            return options
        mask: Any = np.asarray(options["reset_mask"])
        if len(self.groups) == 1 and len(mask) == self.num_envs != self.joint.num_envs:
            of_envs = mask.reshape(self.joint.num_envs, -1)
            if (of_envs.any(axis=1) != of_envs.all(axis=1)).any():
                raise ValueError("reset_mask selects only some agents of an env, but an env resets all of its agents")
            mask = of_envs.any(axis=1)
        return {**options, "reset_mask": mask}


def _make_joint(env_fn: Callable[[], Any], how: dict[str, Any], wrap: Callable[[gym.Env], gym.Env] | None) -> gym.Env:
    made = env_fn()
    try:
        env = JointEnv(made, env_fn, **how)
        return env if wrap is None else wrap(env)
    except BaseException:
        with contextlib.suppress(Exception):  # it may be something else
            made.close()
        raise


def _outlines(groups: Sequence[AgentGroup]) -> list[tuple[Any, ...]]:
    """Returns the groups without their observation spaces, which the vector env of joint envs compares."""
    return [(group.name, group.agents, group.action_space) for group in groups]


def own_path(path: Path, group: str) -> Path | None:
    """Returns the path that a field of joint envs has for the rows of a group, or None for other fields."""
    if len(path) < 2 or path[1] != group:
        return None
    if path[0] == layout.ACTION:
        return (layout.ACTION, *path[2:])
    if path[2] == keys.OBSERVED:
        return (path[0], *path[3:])
    return path[2:] if path[0] == layout.OBSERVATION else None


def _rows(array: np.ndarray, axis: int = 1) -> np.ndarray:
    """Returns an array `[..., M, K, *shape]` as `[..., M * K, *shape]`, where M has the given axis."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
