"""Record: episodes of the deterministic policy as MP4 files, drawn without a display."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym

import vecenv
from ppo.config import Config
from ppo.envs import EnvSource, drawing_env, evaluation_options, sentence_of
from ppo.model.agent import Agent
from ppo.results.evaluation import Evaluation, evaluate
from ppo.results.policy import load_agent
from ppo.results.recording import Recorded
from ppo.run.folder import IMPORTED, Run, RunError, part_of
from vecenv.opengl import backends


class VideoError(RunError):
    """No video could be recorded; the message says why and what to install or change."""


def record_run(
    run: Run,
    folder: Path,
    episodes: int,
    *,
    seed: int | None = None,
    envs: EnvSource = None,
    warn: Callable[[str], None] = print,
) -> tuple[list[Path], Evaluation]:
    """Records episodes of a run's newest checkpoint, as `record` does.

    Args:
        run: What `ppo.train` made.
        folder: Where the files go.
        episodes: How many, each in a file of its own.
        seed: Of the env; None for the run's own.
        envs: As for `ppo.train`, if the run was not trained on its config's env; with render_mode="rgb_array".
        warn: Told about damaged checkpoints.

    Raises:
        RunError: If the run has no checkpoint that can be read.
        VideoError: If there can be no video.
    """
    config = run.read_config(imports=IMPORTED if envs is None else ("network",))
    run.check_begun()
    run.check_given(envs is not None)
    agent = load_agent(run, warn)
    config = config if seed is None else dataclasses.replace(config, seed=seed)
    return record(agent, config, folder, episodes, prefix=run.path.resolve().name, envs=envs)


def record(
    agent: Agent, config: Config, folder: Path, episodes: int, *, prefix: str, envs: EnvSource = None
) -> tuple[list[Path], Evaluation]:
    """Plays episodes, one after the other, and writes `folder/PREFIX-episode-K.mp4`: all of them or none.

    The env draws in a worker process: OpenGL by Mesa dies in a process that has loaded TensorFlow.

    Args:
        agent: Whose deterministic policy plays.
        config: Names the env, its seed and its timeout.
        folder: Made if it is not there.
        episodes: How many.
        prefix: Of the names of the files.
        envs: As for `ppo.train`.

    Returns:
        The files, in the order of the episodes, and their returns.

    Raises:
        VideoError: If the env cannot render pictures, or nothing here can draw, encode or keep them.
    """
    _check_encoder()
    make = drawing_env(config, envs)
    try:
        with part_of(folder) as part:
            drawn, evaluation = _play(agent, config, Recorded(make, part, prefix, episodes))
            names = [f"{prefix}-episode-{k}.mp4" for k in range(episodes)]
            for name, length in zip(names, evaluation.lengths, strict=True):
                _check_whole(drawn / name, frames=length + 1)
            for name in names:
                os.replace(drawn / name, folder / name)
    except VideoError:
        raise
    except vecenv.VecEnvError as error:  # before OSError, as what an env raised may be one too
        raise VideoError(f"{config.env} could not be recorded: {sentence_of(error)}") from error
    except (RunError, multiprocessing.TimeoutError) as error:
        raise VideoError(f"{config.env} could not be recorded: {error}") from error
    except OSError as error:
        raise VideoError(f"cannot write videos into {folder}: {error}. Choose another folder (--outdir).") from error
    return [folder / name for name in names], evaluation


def _check_encoder() -> None:
    try:
        import imageio_ffmpeg
        import moviepy  # noqa: F401  RecordVideo's encoder

        subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-version"], check=True, capture_output=True)
    except ImportError as error:
        raise VideoError(f"{error.name}, which writes videos, is missing: `pip install -e '.[video]'`") from error
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise VideoError(f"no ffmpeg works here, which encodes videos: `apt-get install ffmpeg` ({error})") from error


def _check_whole(file: Path, frames: int) -> None:
    """Raises VideoError if the encoder left frames out, which it does not always say."""
    import imageio_ffmpeg

    try:
        found = imageio_ffmpeg.count_frames_and_secs(str(file))[0] if file.is_file() else 0
    except RuntimeError:  # not even a beginning of a video
        found = 0
    if found < frames - 1:  # moviepy's rounding may leave out the last
        raise VideoError(f"{file.name} would have {found} frames instead of {frames}: is the disk full?")


def _play(agent: Agent, config: Config, recorded: Recorded) -> tuple[Path, Evaluation]:
    """Plays in an env that can draw, with the first OpenGL that works; returns where the files are."""
    reasons: dict[str, None] = {}
    for backend in backends() or [None]:
        folder = recorded.folder / (backend or "display")
        with _single_env(dataclasses.replace(recorded, backend=backend, folder=folder)) as envs:
            try:
                envs.call_async("why_not")
                (why_not,) = envs.call_wait(config.step_timeout_s)
            except vecenv.WorkerDied as error:  # by a driver that crashed
                why_not = str(error)
            if why_not is None:
                found = evaluate(agent, envs, recorded.episodes, seed=config.seed, timeout_s=config.step_timeout_s)
                return folder, found
            reasons[why_not] = None
    raise VideoError(f"{config.env} cannot be drawn: {'; '.join(reasons)}")


def _single_env(make: Callable[[], gym.Env]) -> vecenv.AsyncVectorEnv:
    return vecenv.AsyncVectorEnv([make], num_workers=1, **evaluation_options())
