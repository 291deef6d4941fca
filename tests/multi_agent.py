"""Envs with several agents that the tests share, and a plain loop that shows what their rows must hold."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper


class LeavingEnv(ParallelEnv):
    """Agents that leave at different times, one that enters late, and rewards that tell agent, step and action apart.

    Agents a_0 and a_1 terminate in steps 3 and 5, b_0 is truncated in step 4, and a_2 enters in step 2 and is truncated
    in step 7, which ends the episode. The agents b have another space.
    """

    metadata: ClassVar = {"name": "leaving"}
    possible_agents = ("a_0", "a_1", "a_2", "b_0")
    LAST: ClassVar = {"a_0": (3, True), "a_1": (5, True), "a_2": (7, False), "b_0": (4, False)}

    def __init__(self, index: int = 0, fault: str | None = None):
        self.index, self.fault, self.render_mode = index, fault, None
        self.episode = -1
        self.steps = 0
        self._rng = np.random.default_rng()
        self._spaces = {
            name: (spaces.Box(-np.inf, np.inf, (3 if name[0] == "a" else 2,), np.float64), spaces.Discrete(4))
            for name in self.possible_agents
        }

    def observation_space(self, agent):
        return self._spaces[agent][0]

    def action_space(self, agent):
        return self._spaces[agent][1]

    def _observe(self, agent):
        values = [self.episode + 10 * self.index, self.steps, self._rng.random()]
        return np.array(values[: 3 if agent[0] == "a" else 2])

    def reset(self, seed=None, options=None):
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.episode, self.steps = self.episode + 1, 0
        self.agents = ["a_0", "a_1", "b_0"]
        return {name: self._observe(name) for name in self.agents}, {name: {"started": 1.5} for name in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), (actions, self.agents)
        self.steps += 1
        if self.fault == "raise" and self.steps == 4:
            raise ValueError("the motor is on fire")
        if self.fault == "sigkill" and self.steps == 4 and self.episode == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang" and self.steps == 4:
            signal.pause()
        stepped = list(self.agents)
        ended = {name: self.LAST[name][0] == self.steps for name in stepped}
        if self.steps == 2:
            self.agents = [*self.agents, "a_2"]
        observations = {name: self._observe(name) for name in self.possible_agents if name in self.agents}
        rewards = {name: self.steps + 0.25 * int(actions[name]) + 0.001 * int(name[-1]) for name in stepped}
        terminated = {name: ended[name] and self.LAST[name][1] for name in stepped}
        truncated = {name: ended[name] and not self.LAST[name][1] for name in stepped}
        infos = {name: {"step": self.steps} for name in observations}
        self.agents = [name for name in self.agents if not ended.get(name, False)]
        return observations, rewards, terminated, truncated, infos

    def get_state(self):
        return {"rng": self._rng, "episode": self.episode, "steps": self.steps, "agents": list(self.agents)}

    def set_state(self, state):
        self._rng, self.episode, self.steps = state["rng"], state["episode"], state["steps"]
        self.agents = state["agents"]

    def state(self):
        return np.array([self.steps, len(self.agents)], np.float32)


class Turns(LeavingEnv):
    """LeavingEnv with action masks, which forbid every action in an agent's first, third, fifth and seventh step."""

    def observation_space(self, agent):
        return spaces.Dict(observation=super().observation_space(agent), action_mask=spaces.MultiBinary(4))

    def _observe(self, agent):
        mask = np.int8([1, 1, 0, 1]) * np.int8(self.steps % 2)
        return {"observation": super()._observe(agent), "action_mask": mask}


class Expected(NamedTuple):
    """What the row of one agent must hold after a step."""

    observation: Any  # None: zeros
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    episode_return: float
    episode_length: int
    final: Any  # with SAME_STEP, the last observation of an agent whose episode ended; else None


def plain_loop(
    make: Callable[[], Any], seed: int, mode: str, choose: Callable[[int, int], Any]
) -> Iterator[dict[str, Expected]]:
    """Steps one env with autoreset in a plain loop; yields what each agent's row must hold after the reset and steps.

    Args:
        make: Makes the parallel env.
        seed: Seed of the first reset.
        mode: "NextStep" or "SameStep".
        choose: Returns the action of agent k in step t.
    """
    env = make()
    names = list(env.possible_agents)
    observations, _ = env.reset(seed=seed)
    totals: dict[str, tuple[float, int]] = dict.fromkeys(names, (0.0, 0))
    live = set(env.agents)
    yield {name: _first(observations, name, live) for name in names}
    waiting, t = False, 0
    while True:
        if waiting:
            observations, _ = env.reset()
            live, waiting, totals = set(env.agents), False, dict.fromkeys(names, (0.0, 0))
            yield {name: _first(observations, name, live) for name in names}
            t += 1
            continue
        actions = {name: choose(t, names.index(name)) for name in env.agents}
        observations, rewards, terminated, truncated, _ = env.step(actions)
        rows: dict[str, Expected] = {}
        for name in names:
            if name in live:
                totals[name] = (totals[name][0] + float(rewards[name]), totals[name][1] + 1)
                ends, cuts = bool(terminated[name]), bool(truncated[name])
                over = ends or cuts
                final = observations[name] if over and mode == "SameStep" else None
                row = (observations[name], float(rewards[name]), ends, cuts, not over, *totals[name], final)
                rows[name] = Expected(*row)
                if over:
                    live.discard(name)
            elif name in env.agents:
                totals[name] = (0.0, 0)
                live.add(name)
                rows[name] = Expected(observations[name], 0.0, False, False, True, 0.0, 0, None)
            else:
                rows[name] = Expected(None, 0.0, False, False, False, 0.0, 0, None)
        if not live:
            if mode == "SameStep":
                observations, _ = env.reset()
                live, totals = set(env.agents), dict.fromkeys(names, (0.0, 0))
                rows = {
                    name: row._replace(observation=observations.get(name), valid=name in live)
                    for name, row in rows.items()
                }
            else:
                waiting = True
        yield rows
        t += 1


def _first(observations: dict[str, Any], name: str, live: set[str]) -> Expected:
    return Expected(observations.get(name), 0.0, False, False, name in live, 0.0, 0, None)


class Breaks(LeavingEnv):
    def step(self, actions):
        if self.episode == 1 and self.steps == 3:
            raise ValueError("the motor is on fire")
        return super().step(actions)


class BadReward(LeavingEnv):
    def step(self, actions):
        observations, rewards, *others = super().step(actions)
        if "b_0" in rewards and self.index == 1:
            rewards["b_0"] = np.nan
        return observations, rewards, *others


class HangsInEvaluation(LeavingEnv):
    def reset(self, seed=None, options=None):
        self.evaluated = seed is not None and seed >= 2**30  # the seeds of evaluations
        return super().reset(seed, options)

    def step(self, actions):
        if self.evaluated:
            time.sleep(3)  # longer than the timeout of its test, and shorter than the grace period that follows
        return super().step(actions)


class OneAgent(ParallelEnv):
    """A Gymnasium env as a PettingZoo env with one agent."""

    metadata: ClassVar = {"name": "one"}
    possible_agents = ("a_0",)

    def __init__(self, env_id: str = "CartPole-v1"):
        import gymnasium as gym

        self._env, self.render_mode = gym.make(env_id), None

    def observation_space(self, agent):
        return self._env.observation_space

    def action_space(self, agent):
        return self._env.action_space

    def reset(self, seed=None, options=None):
        self.agents = ["a_0"]
        observation, info = self._env.reset(seed=seed, options=options)
        return {"a_0": observation}, {"a_0": info}

    def step(self, actions):
        observation, reward, terminated, truncated, info = self._env.step(actions["a_0"])
        if terminated or truncated:
            self.agents = []
        return {"a_0": observation}, {"a_0": reward}, {"a_0": terminated}, {"a_0": truncated}, {"a_0": info}


class Numbered(BaseParallelWrapper):
    """Adds each agent's number to its observation, as a one-hot vector."""

    def observation_space(self, agent):
        number = spaces.Box(0, 1, (len(self.possible_agents),), np.float32)
        return spaces.Dict(observation=self.env.observation_space(agent), agent_id=number)

    def _numbered(self, observations):
        numbers = dict(zip(self.possible_agents, np.eye(len(self.possible_agents), dtype=np.float32), strict=True))
        return {name: {"observation": seen, "agent_id": numbers[name]} for name, seen in observations.items()}

    def reset(self, seed=None, options=None):
        observations, infos = super().reset(seed=seed, options=options)
        return self._numbered(observations), infos

    def step(self, actions):
        observations, *others = super().step(actions)
        return self._numbered(observations), *others


class Rings(ParallelEnv):
    """Two agents walk around a ring, whatever they do; moving from the last place to the first gives a reward of 1.

    The move terminates the episode of agent a_0. Agent a_1 goes on until the env truncates it in step `length`, so a_0
    is gone for most of the episode.
    """

    metadata: ClassVar = {"name": "rings"}
    possible_agents = ("a_0", "a_1")
    PLACES = 8

    def __init__(self, length: int = 11):
        self._length, self.render_mode, self._rng = length, None, np.random.default_rng()
        self._spaces = {name: spaces.Discrete(self.PLACES) for name in self.possible_agents}
        self._actions = {name: spaces.Discrete(2) for name in self.possible_agents}

    def observation_space(self, agent):
        return self._spaces[agent]

    def action_space(self, agent):
        return self._actions[agent]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._places = {name: int(self._rng.integers(self.PLACES)) for name in self.possible_agents}
        self._steps, self.agents = 0, list(self.possible_agents)
        return dict(self._places), {name: {} for name in self.agents}

    def step(self, actions):
        self._steps += 1
        passed = {name: self._places[name] == self.PLACES - 1 for name in self.agents}
        for name in self.agents:
            self._places[name] = (self._places[name] + 1) % self.PLACES
        stepped, over = list(self.agents), self._steps == self._length
        terminated = {name: name == "a_0" and passed[name] for name in stepped}
        truncated = {name: over and not terminated[name] for name in stepped}
        self.agents = [name for name in stepped if not (terminated[name] or truncated[name])]
        places = {name: self._places[name] for name in stepped}
        return places, {name: float(passed[name]) for name in stepped}, terminated, truncated, {n: {} for n in stepped}


class Drawn(Rings):
    """Draws ten white rows per step, if MUJOCO_GL was "osmesa" when the env was made."""

    metadata: ClassVar = {"name": "drawn", "render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self):
        super().__init__(length=5)
        self.render_mode, self._backend = "rgb_array", os.environ.get("MUJOCO_GL")

    def render(self):
        if self._backend != "osmesa":
            raise RuntimeError(f"no OpenGL: {self._backend}")
        frame = np.zeros((64, 64, 3), np.uint8)
        frame[: 10 * self._steps] = 255
        return frame


class Relay(ParallelEnv):
    """The first agent takes five steps. The second enters as the first leaves, and takes five. Action 1 earns 1."""

    metadata: ClassVar = {"name": "relay"}
    possible_agents = ("p_0", "p_1")
    render_mode = None

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.steps, self.agents = 0, [self.possible_agents[0]]
        return {name: np.zeros(1, np.float32) for name in self.agents}, {name: {} for name in self.agents}

    def step(self, actions):
        (agent,) = self.agents
        self.steps += 1
        ends = self.steps in (5, 10)
        if ends:
            self.agents = [self.possible_agents[1]] if self.steps == 5 else []
        stepped = [agent, *(self.agents if ends else [])]
        rewards = {name: float(actions.get(name, 0)) for name in stepped}
        observations = {name: np.zeros(1, np.float32) for name in stepped}
        terminated, truncated = {name: ends and name == agent for name in stepped}, dict.fromkeys(stepped, False)
        return observations, rewards, terminated, truncated, {name: {} for name in stepped}


class Higher(ParallelEnv):
    """A game of two moves, one after the other, in which the higher number wins; the second player sees the first move.

    As in PettingZoo's turn-based games, a player's mask forbids every action while the other one moves.
    """

    metadata: ClassVar = {"name": "higher"}
    possible_agents = ("p_0", "p_1")
    MOVES = 4

    def __init__(self):
        self.render_mode = None
        self._observed = {
            name: spaces.Dict(
                observation=spaces.Box(0, self.MOVES, (2,), np.float32),
                action_mask=spaces.Box(0, 1, (self.MOVES,), np.int8),
            )
            for name in self.possible_agents
        }
        self._acted = {name: spaces.Discrete(self.MOVES) for name in self.possible_agents}

    def observation_space(self, agent):
        return self._observed[agent]

    def action_space(self, agent):
        return self._acted[agent]

    def _observe(self):
        turn, first = len(self._moves), self._moves[0] if self._moves else 0
        return {
            name: {
                "observation": np.float32([turn, first]),
                "action_mask": np.full(self.MOVES, k == turn, np.int8),
            }
            for k, name in enumerate(self.possible_agents)
        }

    def reset(self, seed=None, options=None):
        self._moves, self.agents = [], list(self.possible_agents)
        return self._observe(), {name: {} for name in self.agents}

    def step(self, actions):
        self._moves.append(int(actions[self.possible_agents[len(self._moves)]]))
        over = len(self._moves) == 2
        won = float(np.sign(self._moves[0] - self._moves[1])) if over else 0.0
        if over:
            self.agents = []
        flags = dict.fromkeys(self.possible_agents, over)
        results = {"p_0": won, "p_1": -won}, flags, dict.fromkeys(self.possible_agents, False)
        return self._observe(), *results, {name: {} for name in self.possible_agents}
