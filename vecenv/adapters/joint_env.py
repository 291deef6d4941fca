"""JointEnv: a PettingZoo env with all its agents as one Gymnasium env, whose observations and actions are per group."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, create_empty_array

from vecenv import tree
from vecenv.rows import checks
from vecenv.rows.observations import Exact, observation_writer
from vecenv.state.envs import has_state_methods, unknown_state
from vecenv.wrappers import ACTION_MASK, OBSERVED, flat_mask, mask_space

try:
    from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel
    from pettingzoo.utils.env import AECEnv, ParallelEnv
except ImportError as error:
    raise ImportError("vecenv.adapters.pettingzoo needs PettingZoo: pip install pettingzoo") from error

Grouping = Mapping[str, Sequence[str]] | str | None
"""How agents form groups; see `ParallelVectorEnv`."""

STATE = "state"
"""A key that this adapter may add to the observation of an agent, besides the mask."""

VALID = "valid"
REWARD, TERMINATED, TRUNCATED = "reward", "terminated", "truncated"
EPISODE_RETURN, EPISODE_LENGTH = "episode_return", "episode_length"
"""Keys of a group's entry in the observation of a `JointEnv`."""

RESULTS = (VALID, REWARD, TERMINATED, TRUNCATED, EPISODE_RETURN, EPISODE_LENGTH)
"""The keys that hold one number per agent."""


@dataclass(frozen=True)
class AgentGroup:
    """The name of a group, the names of its K agents, and the spaces that each of these agents has."""

    name: str
    agents: tuple[str, ...]
    observation_space: gym.Space
    action_space: gym.Space


class JointEnv(gym.Env):
    """All agents of a PettingZoo env as one env, which a vector env treats like any other.

    The observation is a Dict by group. A group's entry has these keys, each with a leading axis for its K agents:
    - `observation`: the agents' own observations;
    - `valid`, `int8`: whether the agent is alive;
    - `reward`, `float64`, and `terminated` and `truncated`, `int8`: the agent's results of the step;
    - `episode_return`, `float64`, and `episode_length`, `int64`: the totals of the agent's episode so far.

    The action is a Dict by group, also with a leading axis. The reward is the sum over all agents.

    Args:
        env: The PettingZoo env.
        make: Makes another such env.
        groups, state, info_masks: As for `ParallelVectorEnv`.
        same_step: Whether a `reset` after the end of an episode belongs to the same step, as with SAME_STEP autoreset.
            Its observation then still holds the results of the episode's last step.

    Attributes:
        env: The PettingZoo env, with the parallel interface.
        agent_groups: The groups.

    Raises:
        TypeError: If `env` is not a PettingZoo env.
        ValueError: If the agents do not fit the groups, or a space has no fixed shape.
    """

    def __init__(
        self,
        env: Any,
        make: Callable[[], Any],
        *,
        groups: Grouping = None,
        state: bool = False,
        info_masks: bool | None = False,
        same_step: bool = False,
    ):
        self.env = env = _parallel(env)
        names = list(getattr(env, "possible_agents", ()))
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"{env} has possible_agents {names}: they must name each agent once, because each has its own row"
            )
        self._info_masks, self._same_step = info_masks, same_step
        self._groups = []
        state_space = _state_space(env, make) if state else None
        own = {name: (env.observation_space(name), env.action_space(name)) for name in names}
        grouped = groups_of(names, own.__getitem__, groups)
        masks = {group_name: mask_space(own[members[0]][1]) for group_name, members in grouped.items()}
        if info_masks and all(mask is None for mask in masks.values()):
            raise ValueError("no action mask can restrict the actions, none of which is discrete: omit info_masks")
        for group_name, members in grouped.items():
            observed, acted = own[members[0]]
            tree.check_fixed(observed, "Wrap the env so that it returns arrays.")
            tree.check_fixed(acted, "Wrap the env so that it accepts arrays.")
            added: dict[str, gym.Space] = {}
            if info_masks and (masked := masks[group_name]) is not None:
                added[ACTION_MASK] = masked
            if state_space is not None:
                added[STATE] = state_space
            self._groups.append(_Group(group_name, members, observed, acted, added))
        self._row_of = {name: (group, k) for group in self._groups for k, name in enumerate(group.agents)}
        self.observation_space = spaces.Dict([(group.name, group.joint_space) for group in self._groups])
        self.action_space = spaces.Dict([(group.name, group.joint_action_space) for group in self._groups])
        self.agent_groups = tuple(group.description for group in self._groups)
        self.metadata = dict(self.env.metadata or {})
        self.render_mode = getattr(self.env, "render_mode", None)
        self._live: list[str] = []  # agents that are alive
        self._state: Any = None  # `env.state()` with a leading axis
        if state_space is not None:
            self._state = create_empty_array(state_space, 1)
            self._write_state = observation_writer(state_space, {(STATE,): self._state}, {}, STATE, names=["the env"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the env; returns the joint observation, and the infos by agent."""
        observations, infos = self.env.reset(seed=seed, options=options)
        keeps_results = self._same_step and not self._live
        self._live = []
        for group in self._groups:
            _clear(group.observations)
            if not keeps_results:
                _clear(group.results.values())
        self._enter(self.env.agents, observations, infos)
        if not self._live:
            raise ValueError(f"{self.env} has no agents after reset()")
        return self._observation(), self._checked_infos(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps all agents; returns the joint observation, the sum of rewards, the flags of the env, infos by agent.

        The env's episode is over when no agent is left. It counts as truncated if an agent was truncated in its last
        step.
        """
        actions = {}
        for name in self.env.agents:
            group, k = self._row(name)
            actions[name] = group.action_of(action[group.name], k)
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        for group in self._groups:
            group.clear_ended()
        total, remaining = 0.0, set(self.env.agents)
        before, self._live, cut = self._live, [], False
        for name in before:
            group, k = self._row_of[name]
            try:
                observation, reward = observations[name], rewards[name]
                ends, cuts = terminated[name], truncated[name]
            except KeyError:
                raise ValueError(
                    f"step() returned no observation, reward or flag for agent {name!r}, which was alive before the "
                    "step. Fix the env: an agent's last step must return all of them."
                ) from None
            if type(reward) is not float:
                reward = _checked("reward", name, checks.number, reward)
            if ends is not False:
                ends = _checked("terminated", name, checks.flag, ends)
            if cuts is not False:
                cuts = _checked("truncated", name, checks.flag, cuts)
            group.write(k, observation, infos.get(name), ended=ends or cuts)
            group.record(k, reward, ends, cuts)
            total += reward
            if ends or cuts:
                cut = cut or cuts
            elif name in remaining:
                self._live.append(name)
            else:
                raise ValueError(
                    f"agent {name!r} is no longer in env.agents, although it was neither terminated nor truncated. Fix "
                    "the env: without a flag, training would not know how its episode ended."
                )
        # Some envs keep agents whose episodes have ended in env.agents, with their flags set.
        ended = {name for flags in (terminated, truncated) for name, flag in flags.items() if flag}
        self._enter([name for name in self.env.agents if name not in ended.union(before)], observations, infos)
        over = not self._live
        return self._observation(), total, over and not cut, over and cut, self._checked_infos(infos)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    # `call`, `get_attr` and `set_attr` reach the PettingZoo env.

    def get_wrapper_attr(self, name: str) -> Any:
        return getattr(self.env, name) if hasattr(self.env, name) else getattr(self, name)

    def has_wrapper_attr(self, name: str) -> bool:
        return hasattr(self.env, name) or hasattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        setattr(getattr(self.env, "unwrapped", self.env), name, value)
        return True

    def get_state(self) -> Any:
        """Returns the state of the PettingZoo env.

        Raises:
            NotRestorable: If the class of the env, or of its outermost wrapper, does not define `get_state()` and
                `set_state(state)`.
        """
        if not has_state_methods(self.env):
            raise unknown_state(self.env)
        return {
            "env": self.env.get_state(),
            "live": list(self._live),
            "results": [{key: values.copy() for key, values in group.results.items()} for group in self._groups],
            "masks": [None if group.masks is None else group.masks.copy() for group in self._groups],
        }

    def set_state(self, state: Any) -> None:
        """Restores a result of `get_state`."""
        self.env.set_state(state["env"])
        self._live = state["live"]
        for group, results, masks in zip(self._groups, state["results"], state["masks"], strict=True):
            group.restore_results(results)
            if group.masks is not None:
                group.masks[:] = masks
            _clear(group.observations, [k for k, name in enumerate(group.agents) if name not in self._live])

    def _enter(self, names: Iterable[str], observations: Mapping[str, Any], infos: Mapping[str, Any]) -> None:
        """Begins the episodes of agents."""
        for name in names:
            group, k = self._row(name)
            if name not in observations:
                raise ValueError(f"agent {name!r} is in env.agents, but has no observation. Fix the env.")
            group.write(k, observations[name], infos.get(name))
            self._live.append(name)

    def _checked_infos(self, infos: Any) -> dict[str, Any]:
        """Returns the infos without empty dicts."""
        for name in self._row_of.keys() & infos.keys():
            info = {} if infos[name] is None else infos[name]
            if type(info) is not dict:
                _checked("info", name, checks.check_info, info)
            if self._info_masks is None and ACTION_MASK in info:
                raise ValueError(
                    f"the info of agent {name!r} holds an action mask, which the policy would not see: set "
                    "info_masks=True"
                )
        return {
            name: info for name, info in infos.items() if info is not None and (not isinstance(info, Mapping) or info)
        }

    def _observation(self) -> dict[str, Any]:
        if self._state is not None:
            self._write_state(0, self.env.state())
        for group in self._groups:
            group.valid[:] = 0
            if self._state is not None:
                group.agent_observations[STATE][:] = self._state
        for name in self._live:
            group, k = self._row_of[name]
            group.valid[k] = 1
        return {group.name: group.entry for group in self._groups}

    def _row(self, name: str) -> tuple[_Group, int]:
        if name not in self._row_of:
            raise ValueError(f"agent {name!r} is in env.agents, but not in env.possible_agents. Fix the env.")
        return self._row_of[name]


class _Group:
    """The agents of a group, and the buffers for their observations and results.

    `observed` is the space of the observation that the env returns for an agent, and `added` are the spaces of the keys
    that this adapter adds to it.

    Attributes:
        entry: The group's entry in the observation of the joint env. It consists of the next attributes.
        agent_observations: What agents see: a batch of their observation space.
        observations: The arrays of `agent_observations` that are zero for agents that are gone.
        valid: Which agents are alive.
        masks: The action masks in `observations`, if this adapter adds them. They are state, because an agent whose
            last step lacks a mask keeps the previous one.
        results: Rewards, flags and totals, by key.
    """

    def __init__(
        self, name: str, agents: Sequence[Any], observed: gym.Space, acted: gym.Space, added: Mapping[str, gym.Space]
    ):
        self.name, self.agents, count = name, tuple(agents), len(agents)
        self._is_wrapped = bool(added) and not isinstance(observed, spaces.Dict)
        whole = written = observed
        if added:
            own = observed.spaces if isinstance(observed, spaces.Dict) else {OBSERVED: observed}
            if both := added.keys() & own.keys():
                raise ValueError(f"observations of agent {agents[0]!r} already have the keys {sorted(both)}")
            whole = spaces.Dict([*own.items(), *added.items()])
            written = spaces.Dict([*own.items(), *((k, v) for k, v in added.items() if k == ACTION_MASK)])
        self.description = AgentGroup(name, self.agents, whole, acted)
        flags, numbers = spaces.MultiBinary(count), Exact(-np.inf, np.inf, (count,), np.float64)
        lengths = spaces.Box(0, np.iinfo(np.int64).max, (count,), np.int64)
        results = {REWARD: numbers, TERMINATED: flags, TRUNCATED: flags, EPISODE_RETURN: numbers}
        results[EPISODE_LENGTH] = lengths
        self.joint_space = spaces.Dict([(OBSERVED, batch_space(whole, count)), (VALID, flags), *results.items()])
        self.joint_action_space = batch_space(acted, count)
        observations: Any = create_empty_array(whole, count)
        self.agent_observations = observations
        self.valid = np.zeros(count, np.int8)
        self.results = {key: np.zeros(count, space.dtype) for key, space in results.items()}
        self.entry: dict[str, Any] = {OBSERVED: self.agent_observations, VALID: self.valid, **self.results}
        views = {(OBSERVED, *path): tree.pick(observations, path) for path, _ in tree.leaves(written)}
        self.observations = list(views.values())
        self._write = observation_writer(written, views, {}, OBSERVED, names=[f"agent {agent!r}" for agent in agents])
        self.masks: np.ndarray | None = observations[ACTION_MASK] if ACTION_MASK in added else None
        self._acted, self._is_leaf = acted, tree.children(acted) is None
        self._some_ended = False

    def clear_ended(self) -> None:
        """Sets the observations and results of agents whose episodes ended in the last step to zero."""
        if self._some_ended:
            ended = self.results[TERMINATED] | self.results[TRUNCATED]
            _clear([*self.observations, *self.results.values()], ended != 0)
            self._some_ended = False

    def restore_results(self, results: Mapping[str, np.ndarray]) -> None:
        """Sets the results of the last step."""
        for key, values in results.items():
            self.results[key][:] = values
        self._some_ended = True  # or not: the next step looks at the flags

    def write(self, k: int, observation: Any, info: Any, *, ended: bool = False) -> None:
        """Writes the observation of an agent. An agent whose episode has ended needs no mask."""
        if self._is_wrapped:
            observation = {OBSERVED: observation}
        if self.masks is not None:
            mask = (info or {}).get(ACTION_MASK, self.masks[k] if ended else None)
            if mask is None:
                raise ValueError(
                    f"the info of agent {self.agents[k]!r} has no {ACTION_MASK!r}: omit info_masks=True, or fix the env"
                )
            observation = {**observation, ACTION_MASK: flat_mask(mask)}
        self._write(k, observation)

    def record(self, k: int, reward: float, terminated: bool, truncated: bool) -> None:
        """Writes the results of an agent's step."""
        results = self.results
        results[REWARD][k], results[TERMINATED][k], results[TRUNCATED][k] = reward, terminated, truncated
        results[EPISODE_RETURN][k] += reward
        results[EPISODE_LENGTH][k] += 1
        self._some_ended = self._some_ended or terminated or truncated

    def action_of(self, actions: Any, k: int) -> Any:
        """Returns the action of an agent from the actions of its group."""
        if self._is_leaf:
            return actions[k]
        return tree.nest(self._acted, lambda path: tree.pick(actions, path)[k])


def _clear(arrays: Iterable[np.ndarray], rows: Any = slice(None)) -> None:
    for array in arrays:
        array[rows] = 0


def groups_of(agents: Sequence[Any], spaces_of: Callable[[Any], Any], grouping: Grouping) -> dict[str, list[Any]]:
    """Returns the agents of each group, by name. `spaces_of(agent)` returns the spaces, in a form that can be compared.

    Raises:
        ValueError: If `grouping` is unknown, does not name each agent once, or combines agents with different spaces.
    """
    if isinstance(grouping, Mapping):
        listed = [agent for members in grouping.values() for agent in members]
        if Counter(listed) != Counter(agents):
            raise ValueError(f"groups={grouping} must name each agent once; the agents are {list(agents)}")
        for name, members in grouping.items():
            if different := [agent for agent in members if spaces_of(agent) != spaces_of(members[0])]:
                raise ValueError(
                    f"agents {members[0]!r} and {different[0]!r} of group {name!r} have different spaces: put them "
                    "into different groups"
                )
        return {name: list(members) for name, members in grouping.items() if members}
    if grouping not in (None, "names"):
        raise ValueError(f'groups={grouping!r} is unknown: use None, "names", or a dict from names to lists of agents')
    found: list[list[Any]] = []
    for agent in agents:
        for members in found:
            if spaces_of(members[0]) == spaces_of(agent) and (grouping is None or _stem(members[0]) == _stem(agent)):
                members.append(agent)
                break
        else:
            found.append([agent])
    named: dict[str, list[Any]] = {}
    for members in found:
        stems = list(dict.fromkeys(map(_stem, members)))
        name = "-".join(stems) if len(stems) <= 3 else "agents"
        taken = {*named, *(str(agent) for agent in agents if agent not in members)}
        candidates = [name, *(f"{name}-{number}" for number in range(2, 2 * len(agents) + 2))]
        named[next(candidate for candidate in candidates if candidate not in taken)] = members
    return named


def _stem(agent: Any) -> str:
    """Returns the name of an agent without its number: "adversary" for "adversary_0"."""
    return re.sub(r"[_-]?\d+$", "", str(agent)) or "agent"


def _parallel(env: Any) -> Any:
    """Returns an env with PettingZoo's parallel interface."""
    if isinstance(env, AECEnv):
        return aec_to_parallel(env) if env.metadata.get("is_parallelizable") else turn_based_aec_to_parallel(env)
    if isinstance(env, ParallelEnv) and not hasattr(env, "possible_agents"):
        raise TypeError(f"{type(env).__name__} does not define possible_agents: set it to the list of all agents")
    if not hasattr(env, "possible_agents") or not hasattr(env, "step"):
        raise TypeError(
            f"{type(env).__name__} is not a PettingZoo env: each function must return a pettingzoo.ParallelEnv or an "
            "AECEnv. For Gymnasium envs, use vecenv.AsyncVectorEnv."
        )
    return env


def _state_space(env: Any, make: Callable[[], Any]) -> gym.Space:
    """Returns the space of `env.state()`. If the env does not define it, another env is made and reset to find out."""
    space = getattr(env, "state_space", None)
    if space is None:
        with contextlib.closing(_parallel(make())) as other:
            other.reset(seed=0)
            value = np.asarray(other.state())
        space = spaces.Box(-np.inf, np.inf, value.shape, value.dtype if value.dtype.kind == "f" else np.float32)
    if not tree.is_fixed(space):
        raise ValueError(f"the state space is {space}, but only arrays can be added to observations: omit state=True")
    return space


def _checked(field: str, agent: Any, check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except TypeError as error:
        raise TypeError(f"{field} of agent {agent!r} {error}. Fix what the env's reset() and step() return.") from None
