"""`python -m vecenv measure ENV` shows whether vecenv speeds up an env: it steps the env in each way, in turns."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from vecenv.errors import in_one_line
from vecenv.make import make, make_single
from vecenv.resources import available_cores
from vecenv.vector.async_vector_env import AsyncVectorEnv

SYNC = "gymnasium SyncVectorEnv"
IN_ONE_CALL = "vecenv.make, in one call"
TURNS = 5
BUSY = 1.5  # ratio of the highest to the lowest speed above which the machine is too busy to compare
LOADED = 0.75  # load average per core, before the measurement, above which other programs take too much
MOST_PER_CORE = 8  # workers to suggest for an env that waits
ACTIONS = 16  # random batches, drawn before the clock starts


@dataclass(frozen=True)
class Measurement:
    """What stepping an env costs, and how fast each vector env steps copies of it, with random actions.

    Attributes:
        step_s: Seconds of each step of a single env.
        reset_s: Seconds of each reset of a single env.
        rates: Env-steps per second in each turn, by the name of the vector env.
        errors: The error of each vector env that cannot be measured, in one line, by its name.
        advice: What else to measure; empty if nothing.
        load: The load average of the minute before.
    """

    step_s: list[float]
    reset_s: list[float]
    rates: dict[str, list[float]]
    errors: dict[str, str]
    advice: str = ""
    load: float = 0.0

    def gains(self, name: str) -> list[float]:
        """Returns a vector env's speed divided by that of Gymnasium's SyncVectorEnv, for each turn."""
        return [rate / base for rate, base in zip(self.rates[name], self.rates.get(SYNC, ()), strict=False)]

    def __str__(self) -> str:
        """Returns the costs, a table of the vector envs, the name of the fastest, and the advice."""
        lines = [
            f"one env alone: a step takes {_spread(self.step_s)}; a reset takes {_spread(self.reset_s)}",
            "",
            f"{'':<28}{'env-steps/s':>13}{'gain':>9}   lowest to highest",
        ]
        for name, rates in self.rates.items():
            gains = self.gains(name)
            gain = f"{statistics.median(gains):.2f} x   {min(gains):.2f} to {max(gains):.2f}" if gains else "-"
            lines.append(f"{name:<28}{statistics.median(rates):>13,.0f}   {gain}")
        lines += [f"{name:<28}failed: {error}" for name, error in self.errors.items()]
        ours = {name: statistics.median(rates) for name, rates in self.rates.items() if name != SYNC}
        if ours:
            best = max(ours, key=ours.__getitem__)
            fastest = f"Fastest: {best}."
            if gains := self.gains(best):
                ratio = statistics.median(gains)
                fastest = f"Fastest: {best}, {ratio:.2f} times as fast as {SYNC}."
                if ratio < 1:
                    fastest = f"Fastest: {SYNC}. Next: {best}, {ratio:.2f} times as fast."
            lines += [
                "",
                fastest,
                "Training gains less, because the policy and the updates take time.",
            ]
        lines += [self.advice] if self.advice else []
        base = self.rates.get(SYNC)
        if base and max(base) > BUSY * min(base):
            lines.append(
                f"Other programs distort this: {SYNC} varies by a factor of {max(base) / min(base):.1f}. Measure again."
            )
        elif self.load > LOADED * (os.cpu_count() or 1):
            lines.append(f"Other programs distort this: the load average was {self.load:.1f} before. Close them first.")
        return "\n".join(lines)


def measure(
    env_id: str,
    *,
    num_envs: int = 16,
    num_workers: Sequence[int] | None = None,
    seconds: float = 20.0,
    wrappers: Sequence[str] = (),
    **env_kwargs: Any,
) -> Measurement:
    """Steps an env alone, then in Gymnasium's SyncVectorEnv and in vecenv's vector envs, which take turns.

    Args:
        env_id: An id or "module:name", as for `vecenv.make`.
        num_envs: Number of envs in each vector env.
        num_workers: Numbers of worker processes to try. None: 0, the powers of two from 2, and the number of cores, but
            at most one per env.
        seconds: Duration without building the envs. It takes longer if steps are slow, because each vector env takes at
            least one step in each turn.
        wrappers: As for `vecenv.make`.
        **env_kwargs: Arguments of the env.

    Raises:
        ValueError: If a number is out of range.
        Exception: Whatever the single env raises. If a vector env raises, its error is in `Measurement.errors`.
    """
    check_numbers(num_envs, num_workers, seconds)
    load = os.getloadavg()[0]
    make_one = functools.partial(make_single, env_id, wrappers=wrappers, **env_kwargs)
    step_s, reset_s, waiting = _alone(make_one, seconds / 4)
    counts = worker_counts(num_envs) if num_workers is None else num_workers
    rivals: dict[str, Callable[[], VectorEnv]] = {SYNC: lambda: gym.vector.SyncVectorEnv([make_one] * num_envs)}
    for workers in counts:
        name = f"vecenv, {workers} worker{'s' if workers != 1 else ''}"
        rivals[name] = functools.partial(AsyncVectorEnv, [make_one] * num_envs, num_workers=workers)
    rivals[IN_ONE_CALL] = functools.partial(make, env_id, num_envs, wrappers=wrappers, **env_kwargs)
    measured: dict[str, VectorEnv] = {}
    errors: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name, build in rivals.items():
            try:
                envs = build()
                stack.enter_context(_closing(name, envs))
                if name == IN_ONE_CALL and isinstance(envs, AsyncVectorEnv) and envs.num_workers:
                    continue  # single envs in workers, which are measured with the numbers of workers in `counts`
                envs.reset(seed=0)
                envs.step(envs.action_space.sample())
                measured[name] = envs
            except Exception as error:
                cause = in_one_line(error)
                if name == IN_ONE_CALL and cause in errors.values():
                    continue  # most likely `make` built single envs, which have failed already
                errors[name] = cause
        turn_s = seconds * 3 / 4 / TURNS / max(1, len(measured))
        rates: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(TURNS):
            for name in list(rates):
                try:
                    rates[name].append(_rate(measured[name], turn_s))
                except Exception as error:
                    errors[name] = in_one_line(error)
                    del rates[name]
    return Measurement(step_s, reset_s, rates, errors, _advice(waiting, num_envs, counts), load)


def check_numbers(num_envs: int, num_workers: Sequence[int] | None, seconds: float) -> None:
    """Raises ValueError if an argument of `measure` is out of range."""
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} is out of range: it must be 1 or more")
    for workers in num_workers or ():
        if not 0 <= workers <= num_envs:
            raise ValueError(f"num_workers={workers} is out of range: it must be 0 to {num_envs}, the number of envs")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds} is out of range: it must be positive and finite")


def worker_counts(num_envs: int) -> list[int]:
    """Returns 0, the powers of two from 2 up to the number of cores, and that number, at most one per env."""
    most = min(available_cores(), num_envs)
    return sorted({0, most, *(2**power for power in range(1, max(1, most.bit_length())) if 2**power <= most)})


def _advice(waiting: float, num_envs: int, num_workers: Sequence[int]) -> str:
    """Returns the number of workers to try for an env that waits for this share of the time, or ""."""
    most = max(num_workers, default=0)
    suggested = min(num_envs, MOST_PER_CORE * available_cores(), math.ceil(available_cores() / max(1e-3, 1 - waiting)))
    if waiting <= 0.5 or suggested <= most:
        return ""
    return (
        f"One env alone waits, or runs another process, for {waiting:.0%} of the time: more workers than cores may "
        f"help. Try --num-workers {suggested}."
    )


def _alone(make_one: Callable[[], gym.Env], seconds: float) -> tuple[list[float], list[float], float]:
    """Returns the seconds of each step and of each reset of one env, and the share of the time that it waits.

    The env is stepped at least ten times.
    """
    step_s: list[float] = []
    env = make_one()
    with _closing("one env", env):
        env.action_space.seed(0)
        reset_s = [_seconds_of(lambda: env.reset(seed=0))]
        used, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        end = start + seconds
        while len(step_s) < 10 or time.perf_counter() < end:
            action = env.action_space.sample()
            begin = time.perf_counter()
            _, _, terminated, truncated, _ = env.step(action)
            step_s.append(time.perf_counter() - begin)
            if terminated or truncated:
                reset_s.append(_seconds_of(env.reset))
        return step_s, reset_s, _waiting_since(used, time.perf_counter() - start)


@contextlib.contextmanager
def _closing(name: str, envs: Any) -> Iterator[None]:
    """Closes envs at the end. An exception of `close` hides neither what was measured nor another exception."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            envs.close()
        raise
    try:
        envs.close()
    except Exception as error:
        warnings.warn(f"{name}: close raised {in_one_line(error)}", stacklevel=2)


def _waiting_since(before: resource.struct_rusage, seconds: float) -> float:
    """Returns the share of these seconds in which this process used no core; 0 if other programs kept it from one."""
    after = resource.getrusage(resource.RUSAGE_SELF)
    if after.ru_nvcsw - before.ru_nvcsw <= after.ru_nivcsw - before.ru_nivcsw:  # more often interrupted than waiting
        return 0.0
    return max(0.0, 1 - (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds)


def _seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _rate(envs: VectorEnv, seconds: float) -> float:
    """Returns env-steps per second, from at least one step."""
    actions = [envs.action_space.sample() for _ in range(ACTIONS)]
    steps, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds or not steps:
        envs.step(actions[steps % ACTIONS])
        steps += 1
    return envs.num_envs * steps / elapsed


def _spread(seconds: list[float]) -> str:
    """Returns the median and the range of the middle 90%, in us or ms."""
    unit, factor = ("ms", 1e3) if statistics.median(seconds) >= 1e-3 else ("us", 1e6)
    ordered = sorted(seconds)
    low, high = ordered[math.floor(0.05 * (len(ordered) - 1))], ordered[math.ceil(0.95 * (len(ordered) - 1))]
    text = f"{statistics.median(seconds) * factor:.3g} {unit}"
    return text if len(ordered) < 10 else f"{text} (90% of them {low * factor:.3g} to {high * factor:.3g})"
