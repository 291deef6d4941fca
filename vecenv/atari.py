"""Atari games as deep Q-networks see them (Mnih et al., 2015), in two forms that return the same values.

Importing this module registers "Atari/Pong-v5" for each "ALE/Pong-v5" of ale-py, with the same arguments. The vector
env is ale-py's in C++. The single envs are Gymnasium's `AtariPreprocessing` and `FrameStackObservation` over a game
with the same seeds, starts and ends as in the vector env. Unlike the vector env, they can be rendered.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, ClipReward, FrameStackObservation

from vecenv.rows.arguments import autoreset_mode_of

try:
    import ale_py
    from ale_py.env import AtariEnv
    from ale_py.vector_env import AtariVectorEnv
except ImportError as error:
    raise gym.error.DependencyNotInstalled("Atari games need ale-py: `pip install 'vecenv-ppo[atari]'`") from error

FRAMES_PER_SECOND = 60
_NO_SEED = -1  # ale-py's number for a game that is not seeded


class VectorGame(AtariVectorEnv):
    """ale-py's vector env, with lists of seeds, masks in infos, and the final observation of each lost life.

    Args:
        life_loss_info: Whether losing a life ends an episode. The game goes on.
        autoreset_mode: Must be `SAME_STEP` if `life_loss_info` is set, or ValueError is raised: other modes reset an
            env between two episodes, but after a lost life the game goes on.
        **arguments: Further arguments of ale-py's vector env.
    """

    def __init__(
        self,
        *,
        life_loss_info: bool = False,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        **arguments: Any,
    ):
        mode = autoreset_mode_of(autoreset_mode)
        if life_loss_info and mode is not AutoresetMode.SAME_STEP:
            raise ValueError(f"life_loss_info=True needs autoreset_mode='SameStep', not {mode.value!r}")
        super().__init__(life_loss_info=life_loss_info, autoreset_mode=mode, **arguments)
        self._lives = np.zeros(self.num_envs, np.int32)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns observations `uint8[N, stack_num, H, W]` and infos. `seed` may also be a list; see `Batched`."""
        if isinstance(seed, (list, tuple)):
            mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
            chosen = [one for one, is_reset in zip(seed, mask, strict=True) if is_reset]
            seed = np.array([_NO_SEED if one is None else one for one in chosen], np.int64)
        observations, infos = super().reset(seed=seed, options=options)
        self._lives = infos["lives"]
        return observations, self._with_masks(infos)

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Returns observations `uint8[N, stack_num, H, W]`, rewards, flags and infos."""
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if "final_obs" in infos:
            # ale-py writes final observations only where it resets a game, and a new game never has fewer lives.
            lost = _lost_life(self._lives, infos["lives"])
            infos["final_obs"][lost] = observations[lost]
        self._lives = infos["lives"]
        return observations, rewards, terminated, truncated, self._with_masks(infos)

    def _with_masks(self, infos: dict[str, Any]) -> dict[str, Any]:
        return infos | {f"_{key}": np.ones(self.num_envs, np.bool_) for key in infos if f"_{key}" not in infos}


def make(
    game: str,
    *,
    img_height: int = 84,
    img_width: int = 84,
    grayscale: bool = True,
    stack_num: int = 4,
    frameskip: int = 4,
    noop_max: int = 30,
    use_fire_reset: bool = True,
    episodic_life: bool = False,
    life_loss_info: bool = False,
    reward_clipping: bool = True,
    max_num_frames_per_episode: int = 108_000,
    repeat_action_probability: float = 0.0,
    **arguments: Any,
) -> gym.Env:
    """Returns one game with the observations, rewards and episode ends of ale-py's vector env.

    The arguments have the names and the defaults of ale-py's vector env.

    Args:
        game: Name of the game in snake case: "space_invaders".
        img_height: Height of an observation, in pixels.
        img_width: Width of an observation, in pixels.
        grayscale: Whether an observation is gray, `uint8[stack_num, H, W]`, or in color, `uint8[stack_num, H, W, 3]`.
        stack_num: Number of the latest frames in an observation. The frames before an episode are zero.
        frameskip: Number of frames for which an action is repeated. An observation is the maximum of the last two.
        noop_max: A game begins with a random number of idle frames below this number.
        use_fire_reset: Whether the first of these frames presses FIRE, if the game has this action.
        episodic_life: Whether losing a life ends the episode and the game.
        life_loss_info: Whether losing a life ends the episode, but not the game, which the next episode continues.
        reward_clipping: Whether rewards are clipped to [-1, 1].
        max_num_frames_per_episode: Number of frames after which an episode is truncated.
        repeat_action_probability: Probability, in each frame, that the previous action is repeated.
        **arguments: Further arguments of `ale_py.AtariEnv`, such as `full_action_space` and `render_mode`.

    Raises:
        gymnasium.error.DependencyNotInstalled: If OpenCV is missing.
    """
    env: gym.Env = Game(
        game=game,
        noop_max=noop_max,
        use_fire_reset=use_fire_reset,
        episodic_life=episodic_life,
        max_num_frames_per_episode=max_num_frames_per_episode,
        repeat_action_probability=repeat_action_probability,
        obs_type="grayscale" if grayscale else "rgb",
        **arguments,
    )
    env.metadata = {**env.metadata, "render_fps": FRAMES_PER_SECOND / frameskip}
    size = (img_width, img_height)
    env = AtariPreprocessing(env, noop_max=0, frame_skip=frameskip, screen_size=size, grayscale_obs=grayscale)
    env = FrameStackObservation(env, stack_num, padding_type="zero")
    if reward_clipping:
        env = ClipReward(env, -1.0, 1.0)
    return EpisodicLife(env) if life_loss_info else env


class Game(AtariEnv):
    """A game that is stepped frame by frame, with the seeds, starts and ends of ale-py's vector env.

    It takes four arguments of `make` and, except `frameskip`, the arguments of `ale_py.AtariEnv`.
    """

    def __init__(
        self, *, noop_max: int, use_fire_reset: bool, episodic_life: bool, max_num_frames_per_episode: int,
        **arguments: Any,
    ):  # fmt: skip
        super().__init__(frameskip=1, **arguments)
        self._num_starts, self._episodic_life = max(noop_max, 1), episodic_life
        self._max_frames, self._frames, self._lives = max_num_frames_per_episode, 0, 0
        self._fires = use_fire_reset and ale_py.Action.FIRE in self._action_set

    def seed_game(self, seed: int | None = None) -> tuple[int, int]:
        """Seeds the emulator and the idle frames with the same number. None draws a seed."""
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0]) // 2
        self._twister = np.random.RandomState(seed)  # in the state of C++'s std::mt19937(seed)
        self.ale.setInt("random_seed", seed)
        return seed, seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins a game and plays its idle frames."""
        super().reset(seed=seed, options=options)
        if self._fires:
            self.ale.act(ale_py.Action.FIRE)
        for _ in range(self._draw() - self._fires):
            self.ale.act(ale_py.Action.NOOP)
            if self.ale.game_over():
                self.ale.reset_game()
        self._frames, self._lives = 0, self.ale.lives()
        return self._get_obs(), self._get_info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Plays one frame."""
        observation, reward, terminated, _, info = super().step(action)
        self._frames += 1
        terminated = terminated or (self._episodic_life and _lost_life(self._lives, info["lives"]))
        self._lives = info["lives"]
        return observation, reward, terminated, self._frames >= self._max_frames and not terminated, info

    def _draw(self) -> int:
        """Draws a number of idle frames as libstdc++'s `std::uniform_int_distribution` does (Lemire, 2019)."""
        while True:
            product = int(self._twister.randint(2**32, dtype=np.uint32)) * self._num_starts
            if product % 2**32 >= 2**32 % self._num_starts:
                return product >> 32


class EpisodicLife(gym.Wrapper):
    """Ends an episode when a life is lost. The next `reset` without a seed goes on with the game."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._lives, self._goes_on = 0, False
        self._last: tuple[Any, dict[str, Any]] = None, {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins a game, or returns the observation in which a life was lost."""
        if not self._goes_on or seed is not None:
            self._last = self.env.reset(seed=seed, options=options)
            self._lives = self._last[1]["lives"]
        self._goes_on = False
        return self._last

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Reports a lost life as the end of the episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        lost = _lost_life(self._lives, info["lives"])
        self._lives, self._last = info["lives"], (observation, info)
        self._goes_on = lost and not terminated and not truncated
        return observation, reward, terminated or lost, truncated and not lost, info


def _lost_life(before: Any, now: Any) -> Any:
    """Returns whether a life was lost and the game goes on. The last life ends the game, often some frames later."""
    return (now < before) & (now > 0)


def _register() -> None:
    for spec in list(gym.registry.values()):
        if spec.namespace == "ALE" and spec.vector_entry_point is not None:
            gym.register(
                f"Atari/{spec.name}-v{spec.version}",
                entry_point="vecenv.atari:make",
                vector_entry_point="vecenv.atari:VectorGame",
                kwargs=spec.kwargs,
            )


_register()
