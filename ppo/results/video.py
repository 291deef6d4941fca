"""Videos of the deterministic policy as MP4 files, rendered without a display.

The env renders and encodes in a worker process. Workers import this module but must not load TensorFlow, so only
functions that need TensorFlow import it.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RecordVideo

import vecenv
from ppo.config import Config, ConfigError
from ppo.run.folder import Run, RunError, part_of
from ppo.run.status import Tally
from vecenv.opengl import ADVICE, backends

if TYPE_CHECKING:
    from ppo.envs import EnvFn, EnvSource
    from ppo.model.agent import Agent
    from ppo.results.evaluation import Evaluation


class VideoError(RunError):
    """A video cannot be recorded. The message says why, and what to install or change."""


def record_run(
    run: Run | Path | str,
    folder: Path | str,
    episodes: int,
    *,
    checkpoint: str | int = "latest",
    seed: int | None = None,
    envs: EnvSource = None,
    warn: Callable[[str], None] = print,
    tally: Tally | None = None,
) -> tuple[list[Path], Evaluation]:
    """Records episodes of the deterministic policy of a run.

    Args:
        run: A run folder that `ppo.train` made. `Run.open(path, trust_modules=True)` allows the import of its modules.
        folder: Folder for the files; created if it does not exist.
        episodes: Number of episodes, with one file per episode. An episode that does not end is cut off, see
            `ppo.evaluate_run`, and is the last.
        checkpoint: As for `load_policy`.
        seed: Seed of the env; None for the run's seed.
        envs: As for `ppo.train`, for a run that was not trained on its config's env. They must have
            render_mode="rgb_array".
        warn: Called with a message for each damaged checkpoint, and if an episode does not end.
        tally: Counts the episodes and steps, for a display.

    Returns:
        The files, in the order of the episodes, and the score of each episode.

    Raises:
        RunError: If the run has no checkpoint that can be read.
        VideoError: If no video can be recorded.
    """
    from ppo.results.evaluation import config_to_play, limit_of
    from ppo.results.policy import load_agent
    from ppo.run.checkpoint import number_in

    run = Run.open(run)
    config, prefix = config_to_play(run, envs, seed), run.path.resolve().name
    agents = {team: load_agent(run, warn, checkpoint=checkpoint, team=team) for team in run.read_spaces()}
    limit = limit_of(number_in(run.checkpoints, checkpoint, "episodes", "longest"))
    how: dict[str, Any] = {"envs": envs, "limit": limit, "warn": warn, "tally": tally}
    return record(agents, config, Path(folder), episodes, prefix=prefix, **how)


def record(
    agents: Mapping[str, Agent],
    config: Config,
    folder: Path,
    episodes: int,
    *,
    prefix: str,
    limit: int,
    warn: Callable[[str], None],
    envs: EnvSource = None,
    tally: Tally | None = None,
) -> tuple[list[Path], Evaluation]:
    """Plays episodes one by one and writes `folder/PREFIX-episode-K.mp4`. Writes either all files or none.

    The env renders in a worker process, because Mesa's OpenGL crashes in a process that has loaded TensorFlow.

    Args:
        agents: The agent of each team, whose deterministic policy plays.
        config: The settings, for the env, its seed and its timeout.
        folder: Folder for the files; created if it does not exist.
        episodes: Number of episodes.
        prefix: Prefix of the file names.
        limit, warn: As for `ppo.results.evaluation.play`.
        envs: As for `ppo.train`.
        tally: Counts the episodes and steps, for a display.

    Returns:
        The files, in the order of the episodes, and the score of each episode.

    Raises:
        VideoError: If the env cannot render, or the video cannot be encoded or written.
    """
    from ppo.envs import sentence_of

    check_encoder()
    folder = folder.absolute()  # ffmpeg takes the start of a relative path for a flag or a protocol: "-x", "a:b"
    make = _env_that_renders(config, envs)
    how = {"timeout_s": config.step_timeout_s, "limit": limit, "warn": warn, "tally": tally}
    try:
        with part_of(folder) as part:
            recorded, evaluation = _play(agents, config, make, Recording(part, prefix, episodes), how)
            names = [f"{prefix}-episode-{k}.mp4" for k in range(len(evaluation.lengths))]
            for name, length in zip(names, evaluation.lengths, strict=True):
                _check_frames(recorded / name, expected=length + 1)
            for name in names:
                os.replace(recorded / name, folder / name)
    except VideoError:
        raise
    except vecenv.VecEnvError as error:  # before OSError, because an error of the env can be both
        raise VideoError(f"{config.env} could not be recorded: {sentence_of(error)}") from error
    except (RunError, multiprocessing.TimeoutError) as error:
        raise VideoError(f"{config.env} could not be recorded: {error}") from error
    except OSError as error:
        raise VideoError(f"cannot write videos into {folder}: {error}. Choose another folder (--outdir).") from error
    return [folder / name for name in names], evaluation


def check_encoder() -> None:
    """Raises VideoError if ffmpeg or a package that videos need is missing."""
    try:
        import imageio_ffmpeg
        import moviepy  # noqa: F401  RecordVideo's encoder

        subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-version"], check=True, capture_output=True)
    except ImportError as error:
        raise VideoError(f"{error.name} is missing, but videos need it: `pip install -e '.[video]'`") from error
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise VideoError(
            f"videos need ffmpeg, and no working ffmpeg was found: run `apt-get install ffmpeg` ({error})"
        ) from error


def _check_frames(file: Path, expected: int) -> None:
    """Raises VideoError if the encoder dropped frames, which it does not always report."""
    import imageio_ffmpeg

    try:
        found = imageio_ffmpeg.count_frames_and_secs(str(file))[0] if file.is_file() else 0
    except RuntimeError:  # the file is not a video
        found = 0
    if found < expected - 1:  # moviepy rounds the duration, which can drop the last frame
        raise VideoError(f"{file.name} would have {found} frames instead of {expected}: is the disk full?")


def _play(
    agents: Mapping[str, Agent], config: Config, make: EnvFn, recording: Recording, how: Mapping[str, Any]
) -> tuple[Path, Evaluation]:
    """Plays with the first OpenGL backend that works. Returns the folder of the files, and the scores."""
    from ppo.envs import evaluation_options, parallel_envs, spaces_of
    from ppo.results.evaluation import check_playable, play, whole_envs

    reasons: dict[str, None] = {}
    for backend in backends() or [None]:
        folder = recording.folder / (backend or "display")
        recorded = dataclasses.replace(recording, folder=folder)
        options = {**evaluation_options(config), "num_workers": 1}
        vector: AbstractContextManager[Any] = (
            parallel_envs(config, functools.partial(_made, make, backend), 1, options, wrap=recorded)
            if config.is_multi_agent
            else vecenv.AsyncVectorEnv([functools.partial(_made, make, backend, recorded)], **options)
        )
        with vector as envs:
            try:
                check_playable(agents, spaces_of(config, envs))
            except ConfigError as error:
                raise VideoError(
                    f"{config.env} cannot be rendered: {error}. Train with --backend python: single envs can differ "
                    "from a vector env."
                ) from error
            renderer: Any = whole_envs(envs)
            try:
                renderer.call_async("why_not")
                (why_not,) = renderer.call_wait(config.step_timeout_s)
            except vecenv.WorkerDied as error:  # the driver crashed
                why_not = str(error)
            if why_not is None:
                return folder, play(agents, envs, recording.episodes, seed=config.seed, **how)
            reasons[why_not] = None
    raise VideoError(f"{config.env} cannot be rendered: {'; '.join(reasons)}")


def _env_that_renders(config: Config, source: EnvSource) -> EnvFn:
    """Returns a function that makes one env of the kind that a run was trained on, with rendering if possible.

    Raises:
        ConfigError: If `source` is a vector env, from which no single env can be made.
    """
    from ppo.envs import evaluation_config, functions_of

    if source is None:
        config = evaluation_config(config)
        kwargs = {**config.env_kwargs, "render_mode": "rgb_array"}
        return functions_of(dataclasses.replace(config, env_kwargs=kwargs), None, 1)[0]
    if isinstance(source, gym.vector.VectorEnv):
        raise ConfigError("a video needs a separate env: pass functions that make envs instead of a vector env")
    return functions_of(config, source, 1)[0]


# The code below runs in the env's worker process.


def _made(make: EnvFn, backend: str | None, wrap: Recording | None = None) -> gym.Env:
    """Returns a new env, wrapped by `wrap`, which renders with an OpenGL backend.

    Args:
        make: Makes the env.
        backend: Value of MUJOCO_GL; None to let MuJoCo choose.
        wrap: Records the env; None if the env is wrapped elsewhere.
    """
    # Order: before the env imports MuJoCo, which reads the variable only then.
    if backend is not None:
        os.environ["MUJOCO_GL"] = backend
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame has no display either
    env = make()
    return env if wrap is None else wrap(env)


@dataclasses.dataclass(frozen=True)
class Recording:
    """Wraps an env so that it reports whether it can render, and records its first episodes.

    Attributes:
        folder: Folder for the files.
        prefix: Prefix of the file names.
        episodes: Number of episodes to record.
    """

    folder: Path
    prefix: str
    episodes: int

    def __call__(self, env: gym.Env) -> gym.Env:
        env = _Probed(env)
        if env.render_mode != "rgb_array":
            return env
        return RecordVideo(env, str(self.folder), name_prefix=self.prefix, episode_trigger=self.episodes.__gt__)


class _Probed(gym.Wrapper):
    """Reports whether the env can render, and the length of its episodes."""

    def why_not(self) -> str | None:
        """Renders one frame. Returns the reason if this fails, or None."""
        if self.render_mode != "rgb_array":
            return "it was made without render_mode='rgb_array'"
        try:
            self.env.reset()
            frame = self.env.render()
        except Exception as error:  # from any rendering library
            advice = f". {ADVICE}" if "mujoco" in sys.modules else ""
            return f"{type(error).__name__}: {error}{advice}"
        return None if isinstance(frame, np.ndarray) else f"its render() returned {type(frame).__name__}, not an array"
