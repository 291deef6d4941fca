"""NamedWrapper: a wrapper that a string names, with its arguments as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gymnasium as gym

from vecenv.ids.specs import did_you_mean, import_module

Wrapper: TypeAlias = Callable[[gym.Env], gym.Env]
Wrappers: TypeAlias = Sequence[Wrapper | str]
"""Wrappers as `vecenv.make` accepts them: functions of the env, or strings as for `NamedWrapper`."""

_GYMNASIUMS = "gymnasium.wrappers"


class NamedWrapper:
    """A wrapper named "Wrapper" or "module:Wrapper", optionally followed by ":" and its arguments as a JSON object.

    A name without a module is one of Gymnasium's wrappers. `vecenv.make` also accepts the plain string.

    Args:
        text: For example "TimeAwareObservation", 'FrameStackObservation:{"stack_size": 4}' or "module:Wrapper".

    Attributes:
        module: The wrapper's module. A call imports it.
        name: Name of the wrapper, a class or a function that takes an env.
        kwargs: Arguments of the wrapper. For Gymnasium's wrappers, JSON arrays become tuples, as some of them require.

    Raises:
        ValueError: If the text does not have this form.

    Example:
        >>> import gymnasium as gym
        >>> from vecenv import NamedWrapper
        >>> env = NamedWrapper('FrameStackObservation:{"stack_size": 4}')(gym.make("CartPole-v1"))
        >>> env.observation_space.shape
        (4, 4)
    """

    def __init__(self, text: str):
        named, brace, arguments = text.partition(":{")
        module, _, self.name = named.rpartition(":")
        if not self.name.isidentifier():
            raise ValueError(
                f"{text!r} names no wrapper: write 'Wrapper' for one of Gymnasium's, or 'module:Wrapper', and add its "
                "arguments as JSON: 'Wrapper:{\"size\": 4}'"
            )
        self.text, self.module = text, module or _GYMNASIUMS
        self.kwargs: dict[str, Any] = {}
        if brace:
            try:
                self.kwargs = json.loads("{" + arguments)
            except ValueError as error:
                raise ValueError(
                    f"the arguments of the wrapper {text!r} are not JSON ({error}): write, for example, "
                    f"'{named}:{{\"size\": 4}}'"
                ) from error
        if self.module == _GYMNASIUMS:
            self.kwargs = _with_tuples(self.kwargs)
        # Workers have another `__main__`, so they get what the name refers to in this process.
        self._in_main = getattr(sys.modules["__main__"], self.name, None) if self.module == "__main__" else None

    def load(self) -> Callable[..., gym.Env]:
        """Returns the class or function. Raises gymnasium.error.Error, naming the nearest ones, if there is none."""
        module = import_module(self.module, f"wrapper {self.text!r}")
        wrapper = getattr(module, self.name, self._in_main)
        if not callable(wrapper):
            advice = did_you_mean(self.name, module)
            if self.module == _GYMNASIUMS:
                advice += ' Name a wrapper of another package as "module:Wrapper".'
            raise gym.error.Error(f"wrapper {self.text!r}: {self.module} has no wrapper {self.name!r}.{advice}")
        return wrapper

    def __call__(self, env: gym.Env) -> gym.Env:
        """Returns the wrapped env. Raises gymnasium.error.Error as `load` does."""
        wrapper = self.load()
        try:
            return wrapper(env, **self.kwargs)
        except Exception as error:
            error.add_note(f"The wrapper {self.text!r} raised this error.")
            raise

    def __repr__(self) -> str:
        return f"NamedWrapper({self.text!r})"


def named_wrappers(wrappers: Wrappers) -> tuple[Wrapper, ...]:
    """Returns wrappers with `NamedWrapper` in place of strings. Raises TypeError for a single string."""
    if isinstance(wrappers, str):  # its letters would be taken for names
        raise TypeError(f"wrappers={wrappers!r} is a string: pass a list of wrappers")
    return tuple(NamedWrapper(wrapper) if isinstance(wrapper, str) else wrapper for wrapper in wrappers)


def _with_tuples(value: Any) -> Any:
    """Returns a JSON value with tuples in place of its lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
