"""Videos of a policy as MP4 or GIF files, rendered without a display.

The env renders and encodes in a worker process, because Mesa's OpenGL crashes in a process that has loaded TensorFlow.
Workers import this module but must not load TensorFlow, so only functions that need TensorFlow import it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np

import vecenv
from ppo.config import Config, ConfigError
from ppo.errors import RunError
from ppo.run.files import part_of
from ppo.run.folder import Run
from vecenv.errors import in_one_line
from vecenv.opengl import ADVICE, backends, why_not

if TYPE_CHECKING:
    from ppo.envs import EnvFn, EnvSource
    from ppo.policies.evaluation import EvaluationEnvs, Players
    from ppo.run.scores import Evaluation


_MODES = 'Its metadata must list "rgb_array" in render_modes, as in docs/tutorial.md.'  # advice on an env
SHADOWS = 1024  # pixels of MuJoCo's shadow map; with 4096, it takes half of the rendering time without a GPU

_ENCODERS: dict[str, dict[str, Any]] = {
    "mp4": {"codec": "libx264", "output_params": ["-preset", "veryfast"]},
    "gif": {
        "codec": "gif",
        "pix_fmt_out": "pal8",
        # Few colors without dithering halve the size of the file.
        "output_params": [
            "-filter_complex",
            "split[a][b];[a]palettegen=max_colors=64[p];[b][p]paletteuse=dither=none:diff_mode=rectangle",
        ],
    },
}
"""Arguments of `imageio_ffmpeg.write_frames` for each format."""


class VideoError(RunError):
    """A video cannot be recorded. The message says why, and what to install or change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """What videos show, and how large their files are."""

    format: Literal["mp4", "gif"] = "mp4"
    """File format. A GIF is small by default: 10 seconds of at most 12 frames per second and 256 pixels."""

    camera: int | str | None = None
    """For MuJoCo: the name or number of a camera of the model, or "free" for the environment's own view. None: the
    model's camera "track", else a camera that follows the robot."""

    size: int | str | None = None
    """Size of the frames in pixels: WIDTHxHEIGHT, or one number for both. MuJoCo renders at this size, and other
    frames are scaled. None: the environment's size."""

    frame_skip: int | None = None
    """Render every n-th step. The video plays at the speed of the environment. None: the smallest n that gives at
    most 30 frames per second."""

    seconds: float | None = None
    """Maximum length of a video. The episode still counts as a whole. None: whole episodes."""

    def check(self) -> None:
        """Raises ConfigError if a value is out of range, and VideoError if the encoder is missing."""
        if self.format not in _ENCODERS:
            raise ConfigError(f"format {self.format!r} is unknown: use one of {list(_ENCODERS)}")
        if self.size is not None and not (re.fullmatch(r"\d+(x\d+)?", str(self.size)) and min(self.shape or ()) > 1):
            raise ConfigError(f"size {self.size!r} is not a number of pixels, such as 240, or two, such as 320x240")
        if self.frame_skip is not None and self.frame_skip < 1:
            raise ConfigError(f"frame_skip {self.frame_skip} is out of range: it must be 1 or more")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds {self.seconds} is out of range: it must be above 0")
        _check_encoder()

    @property
    def shape(self) -> tuple[int, int] | None:
        """Width and height of the frames; None for the env's own."""
        size = 256 if self.size is None and self.format == "gif" else self.size
        if size is None:
            return None
        width, _, height = str(size).partition("x")
        return int(width), int(height or width)

    def pace(self, metadata: Mapping[str, Any]) -> tuple[int, float, float]:
        """Returns the steps between two frames, the frames per second, and the maximum number of frames.

        An env whose metadata lack "render_fps" takes 30 steps per second.
        """
        speed = float(metadata.get("render_fps") or 30)
        skip = self.frame_skip or math.ceil(speed / (12 if self.format == "gif" else 30))
        seconds = self.seconds or (10 if self.format == "gif" else math.inf)
        return skip, speed / skip, max(1, seconds * speed // skip) if math.isfinite(seconds) else math.inf


def record_run(
    run: Run | PathLike[str] | str, folder: Path | str, episodes: int, *, checkpoint: str | int = "latest",
    seed: int | None = None, deterministic: bool = True, envs: EnvSource = None, trust_modules: bool = False,
    warn: Callable[[str], None] = print, **options: Any,
) -> tuple[list[Path], Evaluation]:  # fmt: skip
    """Records episodes of the policy of a run.

    Args:
        run: As for `load_policy`.
        folder: Folder for the files; created if it does not exist.
        episodes: Number of episodes, with one file per episode. An endless one is cut off, and is the last.
        checkpoint: As for `ppo.evaluate_run`.
        seed: Seed of the envs; None for a fresh one.
        deterministic: As for `ppo.evaluate_run`.
        envs: As for `ppo.train`, for a run that was not trained on its config's env. They must have
            render_mode="rgb_array". The functions of a list take turns.
        trust_modules: As for `ppo.evaluate_run`.
        warn: As for `ppo.evaluate_run`.
        **options: `format`, `camera`, `size`, `frame_skip` and `seconds`, as in `ppo visualize --help`.

    Returns:
        The files, in the order of the episodes, and the score of each episode.

    Raises:
        ConfigError: If an option is out of range.
        RunError: If the run has no checkpoint that can be read, or names a module that may not be imported.
        VideoError: If no video can be recorded.
    """
    from ppo.policies.evaluation import load_players

    video, run = VideoOptions(**options), Run.open(run, trust_modules=trust_modules)
    video.check()
    players = load_players(
        run, episodes, checkpoint=checkpoint, seed=seed, deterministic=deterministic, envs=envs, warn=warn
    )
    return record(players, run.path.resolve().name, folder, episodes, video, envs)


def record(
    players: Players, name: str, folder: Path | str, episodes: int, video: VideoOptions, envs: EnvSource = None
) -> tuple[list[Path], Evaluation]:
    """Records episodes of policies as files NAME-episode-K.FORMAT; see `record_run`."""
    makers = _functions_that_render(players.config, envs, episodes)
    folder = Path(folder).absolute()  # ffmpeg takes the start of a relative path for a flag or a protocol: "-x", "a:b"
    try:
        with part_of(folder) as part:
            recorder = functools.partial(_Recorder, part, -(-episodes // len(makers)), video)
            recorded, evaluation = _play(players, makers, episodes, recorder)
            files = [folder / f"{name}-episode-{number}.{video.format}" for number in range(len(recorded))]
            for before, after in zip(recorded, files, strict=True):
                os.replace(before, after)
            return files, evaluation
    # Before OSError, because an error of the env can be both.
    except (vecenv.VecEnvError, multiprocessing.TimeoutError) as error:
        refused = isinstance(error, TypeError) and "during construction" in str(error)
        hint = f". Its constructor must accept render_mode. {_MODES}" if refused else ""
        # The import of MuJoCo fails without the library of MUJOCO_GL, with an error of PyOpenGL that does not name it.
        backend = os.environ.get("MUJOCO_GL") if isinstance(error, AttributeError) and "OpenGL" in str(error) else None
        if backend and (reason := why_not(backend)):
            raise VideoError(
                f"{players.config.env} cannot be rendered with MUJOCO_GL={backend}: {reason}. {ADVICE}"
            ) from error
        raise VideoError(f"{players.config.env} could not be recorded: {in_one_line(error)}{hint}") from error
    except OSError as error:
        raise VideoError(f"cannot write videos into {folder}: {error}. Choose another folder (--outdir).") from error


def _check_encoder() -> None:
    """Raises VideoError if ffmpeg or a package that videos need is missing."""
    try:
        import imageio_ffmpeg
        import PIL  # noqa: F401

        subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-version"], check=True, capture_output=True)
    except ImportError as error:
        raise VideoError(f"{error.name} is missing, but videos need it: `pip install 'vecenv-ppo[video]'`") from error
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
    if found < expected:
        raise VideoError(f"a video would have {found} frames instead of {expected}: is the disk full?")


def _play(
    players: Players, makers: Sequence[EnvFn], episodes: int, recorder: functools.partial[_Recorder]
) -> tuple[list[Path], Evaluation]:
    """Plays with the first OpenGL backend that works. Returns the file and the score of each episode."""
    from ppo.envs import spaces_of
    from ppo.policies.evaluation import check_playable, play, whole_envs

    reasons: dict[str, None] = {}
    for backend in backends() or [None]:
        with _rendering_envs(players.config, makers, backend, recorder) as envs:
            spaces = spaces_of(players.config, envs)
            try:
                check_playable(players.agents, spaces)
            except ConfigError as error:
                raise VideoError(
                    f"{players.config.env} cannot be rendered: {error}. Train with --backend python: single envs can "
                    "differ from a vector env."
                ) from error
            if found := _why_not(whole_envs(envs), players.config.step_timeout_s):
                reasons |= dict.fromkeys(found)
                continue
            evaluation = play(players, envs, episodes, functions=len(makers))
            of_envs: Sequence[dict[Path, int]] = whole_envs(envs).get_attr("files")
        # An env may have begun another episode after its last one that counts.
        played = np.bincount(evaluation.functions).tolist() if len(makers) > 1 else [len(evaluation.lengths)]
        files = [item for of_env, count in zip(of_envs, played, strict=True) for item in [*of_env.items()][:count]]
        for file, frames in files:
            _check_frames(file, frames)
        return [file for file, _ in files], evaluation
    reason = "; ".join(reasons)
    hint = f". {_MODES}" if "no render_modes" in reason else ""  # Gymnasium's message
    raise VideoError(f"{players.config.env} cannot be rendered: {reason}{hint}")


def _rendering_envs(
    config: Config, makers: Sequence[EnvFn], backend: str | None, recorder: functools.partial[_Recorder]
) -> AbstractContextManager[EvaluationEnvs]:
    """Returns a context manager that makes one env of each function in a worker, with an OpenGL backend."""
    from ppo.envs import evaluation_options, parallel_envs

    # The env of a restarted worker would begin its files again.
    engine = {**evaluation_options(config), "num_workers": 1, "on_worker_death": "raise"}
    if config.is_multi_agent:
        functions = [functools.partial(_made, make, backend) for make in makers]
        return parallel_envs(config, functions, len(makers), engine, recorder)
    return vecenv.AsyncVectorEnv([functools.partial(_made, make, backend, recorder) for make in makers], **engine)


def _why_not(envs: Any, timeout_s: float | None) -> list[str]:
    """Returns the reasons why envs cannot render; none if they can."""
    try:
        envs.call_async("why_not")
        return [reason for reason in envs.call_wait(timeout_s) if reason is not None]
    except vecenv.WorkerDied as error:  # the driver crashed
        return [str(error)]


def _functions_that_render(config: Config, source: EnvSource, episodes: int) -> list[EnvFn]:
    """Returns the functions that make the envs for a number of episodes, with rendering if possible."""
    from ppo.envs import distinct, evaluation_config, functions_of

    if source is None:
        config = evaluation_config(config)
        kwargs = {**config.env_kwargs, "render_mode": "rgb_array"}
        return functions_of(dataclasses.replace(config, env_kwargs=kwargs), None, 1)
    if isinstance(source, gym.vector.VectorEnv):
        raise ConfigError("a video needs a separate env: pass functions that make envs instead of a vector env")
    functions = distinct(source)
    return functions_of(config, functions, min(episodes, len(functions)))


# The code below runs in the env's worker process.


def _made(make: EnvFn, backend: str | None, wrap: Callable[[gym.Env], gym.Env] | None = None) -> gym.Env:
    """Returns a new env that renders with an OpenGL backend, a value of MUJOCO_GL. None: MuJoCo chooses."""
    # Order: before the env imports MuJoCo, which reads the variable only then.
    if backend is not None:
        os.environ["MUJOCO_GL"] = backend
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame has no display either
    env = make()
    return env if wrap is None else wrap(env)


class _Recorder(gym.Wrapper):
    """Reports whether an env can render, and records its first episodes. `files` maps files to numbers of frames.

    Encodes frames as soon as they are rendered, so an env may reuse its frame and no frame stays in memory.
    """

    def __init__(self, folder: Path, episodes: int, options: VideoOptions, env: gym.Env):
        super().__init__(env)
        self._folder, self._episodes, self._options = folder, episodes, options
        self._skip, self._fps, self._most = options.pace(env.metadata or {})
        self.files: dict[Path, int] = {}
        self._file: Path | None = None  # of the current episode, if it is recorded
        self._steps = 0
        self._encoder: Generator[None, np.ndarray, None] | None = None
        self._shape: tuple[int, ...] = ()

    def why_not(self) -> str | None:
        """Renders one frame. Returns the reason if this fails, or None."""
        if self.render_mode != "rgb_array":
            return "it was made without render_mode='rgb_array'"
        try:
            self.env.reset()
            _set_up_mujoco(self.env, self._options)
            frame = self.env.render()
        except VideoError as error:
            return str(error)
        except Exception as error:  # from any rendering library
            advice = f". {ADVICE}" if "mujoco" in sys.modules and ADVICE not in str(error) else ""
            return f"{in_one_line(error)}{advice}"
        if not isinstance(frame, np.ndarray):
            return f"its render() returned {type(frame).__name__}, not an array"
        if frame.dtype != np.uint8 or frame.shape[2:] not in ((3,), (4,)):
            return f"its render() returned {frame.dtype}{list(frame.shape)}, not uint8[height, width, 3]"
        return None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the env and starts the next recording."""
        result = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        self._finish()
        self._file, self._steps = None, 0
        if len(self.files) < self._episodes:
            self._file = self._folder / f"{id(self)}-{len(self.files)}.{self._options.format}"
            self.files[self._file] = 0
        self._record()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the env and, if one is due, records a frame."""
        result = self.env.step(action)
        self._steps += 1
        self._record()
        return result

    def close(self) -> None:
        """Finishes the recording and closes the env."""
        self._finish()
        super().close()

    def _record(self) -> None:
        if self._file is None or self._steps % self._skip or self.files[self._file] >= self._most:
            return
        frame: Any = self.env.render()
        if self._options.shape is not None:
            from PIL import Image, ImageOps

            frame = np.asarray(ImageOps.contain(Image.fromarray(frame), self._options.shape))
        frame = np.ascontiguousarray(frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2, :3])  # H.264: even sides
        if self._encoder is None:
            import imageio_ffmpeg

            self._shape = frame.shape
            self._encoder = imageio_ffmpeg.write_frames(
                str(self._file), frame.shape[1::-1], fps=self._fps, quality=None, macro_block_size=1,
                ffmpeg_timeout=0, ffmpeg_log_level="error", **_ENCODERS[self._options.format],
            )  # fmt: skip
            self._encoder.send(None)  # type: ignore[arg-type]
        if frame.shape != self._shape:
            raise ValueError(f"render() returned {frame.shape} after {self._shape}: frames must have the same shape")
        try:
            self._encoder.send(frame)
        except OSError as error:
            raise OSError("the encoder stopped: is the disk full?") from error
        self.files[self._file] += 1

    def _finish(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None


def _set_up_mujoco(env: gym.Env, options: VideoOptions) -> None:
    """Chooses the camera, the size and a fast quality of an env that renders with Gymnasium's MujocoRenderer.

    An env that has rendered in `reset` is left as it is, because the policy may observe its frames. Raises VideoError
    if the camera cannot be chosen.
    """
    inner = env.unwrapped
    renderer = getattr(getattr(inner, "vector_env", inner), "mujoco_renderer", None)
    rendering = sys.modules.get("gymnasium.envs.mujoco.mujoco_rendering")
    if rendering is None or not isinstance(renderer, rendering.MujocoRenderer) or renderer.viewer is not None:
        if options.camera is not None:
            why = "has no `mujoco_renderer`, as Gymnasium's MuJoCo envs have, or observes its own frames"
            raise VideoError(f"the camera {options.camera!r} cannot be chosen, because the env {why}")
        return
    visual = renderer.model.vis
    if options.shape is not None:
        renderer.width, renderer.height = options.shape
        visual.global_.offwidth = max(visual.global_.offwidth, renderer.width)
        visual.global_.offheight = max(visual.global_.offheight, renderer.height)
    visual.quality.shadowsize = min(visual.quality.shadowsize, SHADOWS)
    visual.quality.offsamples = 0
    cameras = [renderer.model.camera(i).name for i in range(renderer.model.ncam)]
    camera = None if options.camera is None else str(options.camera)
    if camera is None and renderer.camera_id == -1:  # neither the user nor the env chose a camera
        if "track" in cameras:
            renderer.camera_id = cameras.index("track")
        elif (body := _tracked(renderer)) is not None:
            from mujoco import mjtCamera

            view = renderer.default_cam_config or {}
            renderer.default_cam_config = {**view, "type": mjtCamera.mjCAMERA_TRACKING, "trackbodyid": body}
            renderer.camera_id = None  # otherwise the renderer would set the type
    elif camera == "free":
        renderer.camera_id = -1
    elif camera is not None:
        names = [name or str(i) for i, name in enumerate(cameras)]
        if camera not in cameras and not (camera.isdigit() and int(camera) < len(cameras)):
            raise VideoError(f"the model has no camera {camera!r}: use one of {[*names, 'free']}")
        renderer.camera_id = cameras.index(camera) if camera in cameras else int(camera)


def _tracked(renderer: Any) -> int | None:
    """Returns the body that a camera should follow, or None if the robot stays in place.

    It is the body that the env's own camera names, or else the first body that can move any distance. A view that the
    env chose without such a body is kept.
    """
    from mujoco import mjtJoint

    view, model = renderer.default_cam_config or {}, renderer.model
    if "trackbodyid" in view or "lookat" in view:
        return view["trackbodyid"] if view.get("trackbodyid", 0) > 0 else None
    slides = (model.jnt_type == mjtJoint.mjJNT_SLIDE) & (model.jnt_limited == 0)
    far = (model.jnt_type == mjtJoint.mjJNT_FREE) | slides
    return int(model.jnt_bodyid[far][0]) if far.any() else None
