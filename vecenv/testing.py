"""The conformance suite: `check_vector_env` checks that a vector env does what training code relies on.

Each rule is a function whose docstring is the sentence that it checks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import logger, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from vecenv import tree
from vecenv.errors import NotRestorable
from vecenv.rows.checks import shown
from vecenv.vector.sync_vector_env import SyncVectorEnv

Make = Callable[[], VectorEnv]

SEED = 7
MAX_STEPS = 3000  # steps within which an episode is expected to end
LONG_S = 30  # seconds after which a warning says which rule is being checked


class RuleBroken(AssertionError):
    """Raised by `check_vector_env`. The message names each rule that does not hold and what was observed."""


class _DoesNotApply(Exception):
    """Raised by a rule that does not apply to a vector env, with a reason if the author of the env can change that."""


def check_vector_env(factory: Callable[[], VectorEnv | gym.Env], *, max_steps: int = MAX_STEPS) -> list[str]:
    """Checks every rule in `RULES` on a new vector env, with random actions.

    Args:
        factory: Returns a new vector env or single env on each call. Three single envs are combined in a
            `vecenv.SyncVectorEnv`.
        max_steps: Steps within which an episode is expected to end. If none does, rules about the end of an episode are
            skipped.

    Returns:
        The sentences of the rules that apply and hold. Warnings say why others could not be checked: no episode ended,
        or states could not be saved.

    Raises:
        RuleBroken: If a rule does not hold. The message quotes each broken rule and says what was observed.

    Example:
        >>> import gymnasium as gym
        >>> import vecenv
        >>> from vecenv.testing import check_vector_env
        >>> len(check_vector_env(lambda: vecenv.make("CartPole-v1", num_envs=3, num_workers=0)))
        17
    """

    def make() -> VectorEnv:
        made = factory()
        if isinstance(made, VectorEnv):
            return made
        env_fns: list[Any] = [lambda: made, factory, factory]
        return SyncVectorEnv(env_fns)

    held: list[str] = []
    broken: dict[str, list[str]] = {}  # sentences by what was observed
    cause: Exception | None = None  # the first exception of the envs themselves
    skipped: dict[str, list[str]] = {}  # sentences by reason
    for rule in RULES:
        sentence = str(rule.__doc__)
        envs = make()
        try:
            with contextlib.closing(envs), _watched(sentence):
                rule(envs, make, max_steps)
            held.append(sentence)
        except _DoesNotApply as reason:
            if reason.args:
                skipped.setdefault(str(reason), []).append(sentence)
        except Exception as error:
            broken.setdefault(f"{type(error).__name__}: {error}", []).append(f"- {sentence}\n")
            if cause is None and not isinstance(error, AssertionError):
                cause = error
    for why, sentences in skipped.items():
        logger.warn(f"not checked: {' '.join(sentences)} Reason: {why}")
    if broken:
        count = sum(map(len, broken.values()))
        listed = "\n".join(f"{''.join(sentences)}  {observed}" for observed, sentences in broken.items())
        raise RuleBroken(f"{count} of {len(RULES)} rules do not hold:\n{listed}") from cause
    return held


@contextlib.contextmanager
def _watched(sentence: str) -> Iterator[None]:
    """Warns if the block takes long: envs may hang, and these checks then wait as well."""
    timer = threading.Timer(LONG_S, logger.warn, [f"checking for {LONG_S} s, so an env may hang: {sentence}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def the_action_space_is_the_batch_of_single_ones(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """The action space is the batch of `num_envs` single action spaces."""
    expected = batch_space(envs.single_action_space, envs.num_envs)
    _require(envs.action_space == expected, f"it is {envs.action_space}, not {expected}")


def metadata_names_the_autoreset_mode(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """`metadata["autoreset_mode"]` is an `AutoresetMode`."""
    mode = envs.metadata.get("autoreset_mode")
    _require(isinstance(mode, AutoresetMode), f"it is {mode!r}")


def reset_returns_a_batch_and_infos(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """`reset` returns observations of the observation space and a dict of infos."""
    observations, infos = envs.reset(seed=SEED)
    _assert_observed(envs, observations)
    _assert_infos(envs, infos)
    _assert_unconverted(envs, steps=0)


def step_returns_five_things(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """`step` returns observations of the space, numeric rewards[N], bool terminated[N] and truncated[N], and infos."""
    envs.reset(seed=SEED)
    for result in _steps(envs, 20):
        _assert_valid(envs, *result)
    _assert_unconverted(envs, steps=3)


def the_same_seed_gives_the_same_episodes(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """Two vector envs with the same seed and actions return the same results."""
    with contextlib.closing(make()) as other:
        _assert_same(envs.reset(seed=SEED)[0], other.reset(seed=SEED)[0], "first observations")
        for one, two in zip(_steps(envs, 50), _steps(other, 50), strict=True):
            _assert_same(one[:4], two[:4], "observations, rewards, terminated and truncated")


def a_seed_can_be_used_again(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """A second reset with the same seed begins the same episodes."""
    first = deepcopy(envs.reset(seed=SEED)[0])
    envs.step(_sample(envs))
    _assert_same(envs.reset(seed=SEED)[0], first, "observations")


def a_seed_is_the_first_of_a_run_of_seeds(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """`reset(seed=s)` equals `reset(seed=[s, s + 1, ...])`, if a list is accepted."""
    first = deepcopy(envs.reset(seed=SEED)[0])
    try:
        seeds = [SEED + i for i in range(envs.num_envs)]
        # Gymnasium's own vector envs accept lists, although its base class declares an int.
        again = envs.reset(seed=seeds)[0]  # type: ignore[arg-type]
    except (TypeError, ValueError, gym.error.Error):
        raise _DoesNotApply from None
    _assert_same(again, first, "observations")


def returned_arrays_do_not_change(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """Results of `step` are not changed by the next step (unless the vector env has `copy=False`)."""
    if not getattr(envs, "copy", True):
        raise _DoesNotApply
    kept: tuple[Any, ...] = envs.reset(seed=SEED)[:1]
    before = deepcopy(kept)
    for result in _steps(envs, 5):
        _assert_same(kept, before, "the results of the previous step")
        kept, before = result[:4], deepcopy(result[:4])


def actions_do_not_change(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """`step` does not change the actions that it receives."""
    envs.reset(seed=SEED)
    actions = _sample(envs)
    before = deepcopy(actions)
    envs.step(actions)
    _assert_same(actions, before, "actions")


def the_step_after_an_end_is_the_reset(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """NEXT_STEP: the step after an episode's end has reward 0 and ends no episode, whatever the action."""
    over, _ = _until_an_end(envs, max_steps, AutoresetMode.NEXT_STEP)
    _, rewards, terminated, truncated, _ = envs.step(_sample(envs))
    _require((rewards[over] == 0).all(), f"rewards of envs that were reset: {rewards[over]}")
    _require(not (terminated | truncated)[over].any(), "an episode ended with its reset")


def the_last_observation_is_not_lost(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """SAME_STEP: `infos["final_obs"]` has the last observations of exactly those envs whose episode ended."""
    over, infos = _until_an_end(envs, max_steps, AutoresetMode.SAME_STEP)
    _require("final_obs" in infos, f"infos has only the keys {sorted(infos)}")
    mask = infos["_final_obs"]
    _require((mask == over).all(), f"_final_obs is {mask}, but the episodes that ended are {over}")
    if getattr(envs, "observation_mode", "same") == "same":  # otherwise, the bounds of an env's space are unknown
        for i in np.flatnonzero(over).tolist():
            fault = _fault(envs.single_observation_space, infos["final_obs"][i], "final_obs", i)
            _require(fault is None, str(fault))


def a_reset_mask_resets_only_its_envs(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """`reset(options={"reset_mask": mask})` does not change the envs outside the mask, if masks are supported."""
    of_gymnasium = isinstance(envs.unwrapped, (gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv))
    if not (of_gymnasium or getattr(envs, "steps_subsets", hasattr(envs, "step_rows"))):
        _apply_only_to(envs, AutoresetMode.DISABLED)  # in the other modes, support is optional
    twins = [make(), make()]
    with contextlib.closing(twins[0]), contextlib.closing(twins[1]):
        for each in (*twins, envs):
            each.reset(seed=SEED)
            for result in _steps(each, 10):
                before, _, terminated, truncated = deepcopy(result[:4])
        mask = np.arange(envs.num_envs) == 0
        hint = "`reset`, or `begin` of a MuJoCo task, may write other rows than those of the envs that it resets"
        after, _ = envs.reset(options={"reset_mask": mask})
        for i, (one, other) in enumerate(zip(_rows(envs, after), _rows(envs, before), strict=True)):
            if not mask[i]:
                _assert_same(one, other, f"observations of env {i}: {hint}")
        disabled = envs.metadata.get("autoreset_mode") == AutoresetMode.DISABLED
        if not (disabled and (terminated | truncated).any()):  # otherwise, a reset is needed before the next step
            _assert_same_steps(envs, twins, ~mask, 20, hint)


def an_episode_follows_each_end(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """After the end of an episode, the env continues with the next one."""
    _apply_only_to(envs, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    _until_an_end(envs, max_steps)
    for observations, *_ in _steps(envs, 5):
        _assert_observed(envs, observations)


def a_restored_state_continues_equally(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """A new vector env that gets the states of `get_state` continues like the old one, if both methods exist."""
    _apply_only_to(envs, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    restorable: Any = envs
    if not (hasattr(restorable, "get_state") and hasattr(restorable, "set_state")):
        raise _DoesNotApply
    envs.reset(seed=SEED)
    for _ in _steps(envs, 10):
        pass
    try:
        states = restorable.get_state()
    except NotRestorable as error:
        raise _DoesNotApply(error) from None
    restored: list[Any] = [make(), make()]
    with contextlib.closing(restored[0]), contextlib.closing(restored[1]):
        for another in restored:
            another.reset(seed=SEED + 1)  # all that the states do not hold differs
            another.set_state(states)
        hint = "an attribute that changes may be missing from `get_state`, or from `saved` of a MuJoCo task"
        _assert_same_steps(envs, restored, np.ones(envs.num_envs, bool), 50, hint)


def a_wrong_number_of_actions_is_an_error(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """A batch that lacks one env's action is an error."""
    envs.reset(seed=SEED)
    actions = _sample(envs)
    if not isinstance(actions, np.ndarray):
        raise _DoesNotApply
    try:
        envs.step(actions[:-1])
    except Exception:
        return
    raise AssertionError(f"{len(actions) - 1} actions for {envs.num_envs} envs were accepted")


def a_whole_episode_is_valid(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """Up to the end of an episode, rewards are finite, observations are in the space, and each info has its mask."""
    for step, result in enumerate(_episode(envs, max_steps), 1):
        try:
            _assert_valid(envs, *result)
        except AssertionError as error:
            raise AssertionError(f"step {step:,}: {error}") from None


def close_may_be_called_twice(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """`close` ends all processes of the vector env and may be called twice."""
    before = set(multiprocessing.active_children())
    another = make()
    another.reset(seed=SEED)
    another.close()
    another.close()
    left = set(multiprocessing.active_children()) - before
    _require(not left, f"still running: {left}")


def closing_works_without_a_reset(envs: VectorEnv, make: Make, max_steps: int) -> None:
    """A vector env that was never reset can be closed."""
    envs.close()


RULES = [
    the_action_space_is_the_batch_of_single_ones,
    metadata_names_the_autoreset_mode,
    reset_returns_a_batch_and_infos,
    step_returns_five_things,
    the_same_seed_gives_the_same_episodes,
    a_seed_can_be_used_again,
    a_seed_is_the_first_of_a_run_of_seeds,
    returned_arrays_do_not_change,
    actions_do_not_change,
    the_step_after_an_end_is_the_reset,
    the_last_observation_is_not_lost,
    a_reset_mask_resets_only_its_envs,
    an_episode_follows_each_end,
    a_restored_state_continues_equally,
    a_wrong_number_of_actions_is_an_error,
    a_whole_episode_is_valid,
    close_may_be_called_twice,
    closing_works_without_a_reset,
]


def _require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _apply_only_to(envs: VectorEnv, *modes: AutoresetMode) -> None:
    """Raises unless the vector env has one of these autoreset modes."""
    if envs.metadata.get("autoreset_mode") not in modes:
        raise _DoesNotApply


def _sample(envs: VectorEnv) -> Any:
    envs.action_space.seed(SEED)
    return envs.action_space.sample()


def _steps(envs: VectorEnv, count: int) -> Iterator[tuple[Any, ...]]:
    """Yields the results of steps with random actions, at most until an env must be reset explicitly."""
    envs.action_space.seed(SEED)
    for _ in range(count):
        result = envs.step(envs.action_space.sample())
        yield result
        if envs.metadata.get("autoreset_mode") == AutoresetMode.DISABLED and (result[2] | result[3]).any():
            return


def _until_an_end(envs: VectorEnv, max_steps: int, *modes: AutoresetMode) -> tuple[np.ndarray, dict[str, Any]]:
    """Steps until an episode ends; returns the mask of the envs whose episode ended and the step's infos.

    The rule cannot be checked if no episode ends, and it does not apply if the autoreset mode is not one of `modes`.
    """
    if modes:
        _apply_only_to(envs, *modes)
    for result in _episode(envs, max_steps):  # noqa: B007
        pass
    return result[2] | result[3], result[4]


def _episode(envs: VectorEnv, max_steps: int) -> Iterator[tuple[Any, ...]]:
    """Yields the results of steps from a reset until an episode ends. If none does, the rule cannot be checked."""
    envs.reset(seed=SEED)
    for result in _steps(envs, max_steps):
        yield result
        if (result[2] | result[3]).any():
            return
    raise _DoesNotApply(f"no episode ended within {max_steps:,} steps: give the env a time limit, or pass max_steps.")


def _rows(envs: VectorEnv, observations: Any) -> list[Any]:
    return list(iterate(envs.observation_space, observations))


def _assert_same_steps(envs: VectorEnv, twins: Sequence[VectorEnv], rows: np.ndarray, count: int, hint: str) -> None:
    """Checks that the rows of some steps, `bool[N]`, equal those of two twins.

    The rule does not apply if the twins differ, which is the fault that another rule describes.
    """
    for results in zip(*(_steps(each, count) for each in (envs, *twins)), strict=False):
        one, two, three = (
            (list(itertools.compress(_rows(envs, observations), rows)), [values[rows] for values in ends])
            for observations, *ends, _ in results
        )
        try:
            _assert_same(two, three, "")
        except AssertionError:
            raise _DoesNotApply from None
        _assert_same(one, two, f"observations, rewards, terminated and truncated: {hint}")


def _assert_valid(
    envs: VectorEnv, observations: Any, rewards: Any, terminated: Any, truncated: Any, infos: Any
) -> None:
    """Checks the results of a step."""
    _assert_observed(envs, observations)
    _require(rewards.shape == (envs.num_envs,) and rewards.dtype.kind in "biuf", f"rewards: {rewards!r}")
    _require(np.isfinite(rewards).all(), f"rewards are not finite: {rewards}")
    for name, flags in (("terminated", terminated), ("truncated", truncated)):
        _require(flags.shape == (envs.num_envs,) and flags.dtype == np.bool_, f"{name}: {flags!r}")
    _assert_infos(envs, infos)


def _assert_observed(envs: VectorEnv, observations: Any) -> None:
    fault = _fault(envs.observation_space, observations, "observation")
    _require(fault is None, str(fault))
    count = len(_rows(envs, observations))
    _require(count == envs.num_envs, f"{count} observations of {envs.num_envs} envs")


def _assert_unconverted(envs: VectorEnv, steps: int) -> None:
    """Checks what single envs return, whose dtypes a vector env converts. The envs can then be closed, but not used."""
    of_gymnasium: Any = getattr(envs, "envs", None)
    apply: Any = getattr(envs, "apply", None)
    for i in range(envs.num_envs):
        check = functools.partial(_unconverted_fault, i, steps)
        try:
            fault = apply(check, [i])[0] if apply else check(of_gymnasium[i]) if of_gymnasium else None
        except TypeError:  # there are no single envs
            return
        _require(fault is None, str(fault))


def _unconverted_fault(index: int, steps: int, env: gym.Env) -> str | None:
    """Returns why an observation of an env is not in the env's own space, or None. Runs in the env's process."""
    observation, _ = env.reset(seed=SEED)
    env.action_space.seed(SEED)
    for _ in range(steps):
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            break
    return _fault(env.observation_space, observation, "observation", index)


def _fault(space: gym.Space, value: Any, name: str, env: int | None = None) -> str | None:
    """Returns why a value is not in its space, with key, index and bounds, or None if it is.

    `env` is the index of the env that returned the value; None for a batch, whose first axis is the env.
    """
    if space.contains(value):
        return None
    members = tree.children(space)
    if members is None:
        return _leaf_fault(space, value, name, env)
    if not isinstance(value, (dict, tuple)):
        return f"{name} is {shown(value)}, but its space is a {type(space).__name__}"
    keys, items = [key for key, _ in members], dict(value if isinstance(value, dict) else enumerate(value))
    if items.keys() != set(keys):
        return f"{name} has the keys {list(items)}, but its space has {keys}"
    faults = (_fault(child, items[key], f"{name}[{key!r}]", env) for key, child in members)
    return next(filter(None, faults), f"{name} is a {type(value).__name__}, but its space is a {type(space).__name__}")


def _leaf_fault(space: Any, value: Any, name: str, env: int | None) -> str:
    where = name if env is None else f"{name} of env {env}"
    if not tree.is_fixed(space) or not isinstance(value, (np.ndarray, np.generic)):
        return f"{where} is {shown(value)}, not in {type(space).__name__}"
    if value.shape != space.shape:
        return f"{where} has shape {value.shape}, but its space says {space.shape}"
    if not np.can_cast(value.dtype, space.dtype):
        return f"{where} has dtype {value.dtype}, but its space says {space.dtype}"
    entries = np.asarray(value)
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    elif isinstance(space, spaces.MultiDiscrete):  # also a batch of Discrete
        low, high = space.start, space.start + space.nvec - 1
    else:
        low = high = entries
    outside = np.argwhere(~((low <= entries) & (entries <= high))).tolist()
    if not outside:
        return f"{where} is {shown(value)}, not in {type(space).__name__}"
    at = tuple(outside[0])
    env, index = (at[0], at[1:]) if env is None else (env, at)
    return f"{name}{list(index) or ''} of env {env} is {entries[at]}, outside {low[at]} to {high[at]}"


def _assert_infos(envs: VectorEnv, infos: Any) -> None:
    _require(isinstance(infos, dict), f"infos is a {type(infos).__name__}")
    for key, values in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        masks = isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (envs.num_envs,)
        _require(masks, f"the mask of {key!r} is {mask!r}")
        _require(isinstance(values, dict) or len(values) == envs.num_envs, f"{key!r} has {len(values)} values")


def _assert_same(one: Any, other: Any, what: str) -> None:
    np.testing.assert_equal(one, other, err_msg=what)  # of nested values, too; NaN equals NaN
