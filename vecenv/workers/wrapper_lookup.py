"""`NamedWrapper`: a wrapper named by a string. Only processes that build envs import its module."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym

from vecenv.workers.spec_lookup import did_you_mean, elsewhere, import_module

GYMNASIUMS = "gymnasium.wrappers"


class NamedWrapper:
    """A wrapper named "Wrapper" or "module:Wrapper", optionally followed by ":" and its arguments as a JSON object.

    A name without a module is one of Gymnasium's wrappers. `vecenv.make` also accepts the plain string.

    Args:
        text: For example "NormalizeObservation", 'FrameStackObservation:{"stack_size": 4}' or "module:Wrapper".

    Attributes:
        module: The wrapper's module. A call imports it.
        name: Name of the wrapper, a class or a function that takes an env.
        kwargs: Arguments of the wrapper, besides the env. For Gymnasium's wrappers, JSON arrays become tuples, because
            some of these wrappers refuse lists.

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
        self.text, self.module = text, module or GYMNASIUMS
        self.kwargs: dict[str, Any] = {}
        if brace:
            try:
                self.kwargs = json.loads("{" + arguments)
            except ValueError as error:
                raise ValueError(
                    f"the arguments of the wrapper {text!r} are not JSON ({error}): write, for example, "
                    f"'{named}:{{\"size\": 4}}'"
                ) from error
        if self.module == GYMNASIUMS:
            self.kwargs = _with_tuples(self.kwargs)

    def __call__(self, env: gym.Env) -> gym.Env:
        """Returns the wrapped env.

        Raises:
            gymnasium.error.Error: If there is no such wrapper.
        """
        wrapper = self.load()
        try:
            return wrapper(env, **self.kwargs)
        except Exception as error:
            error.add_note(f"The wrapper {self.text!r} raised this error.")
            raise

    def __repr__(self) -> str:
        return f"NamedWrapper({self.text!r})"

    def load(self) -> Callable[..., gym.Env]:
        """Imports the module in this process and returns the wrapper.

        Raises:
            gymnasium.error.Error: If there is no such wrapper. The message names the nearest ones.
        """
        module = import_module(self.module, f"wrapper {self.text!r}")
        wrapper = getattr(module, self.name, None)
        if not callable(wrapper):
            raise self.unknown(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        return wrapper

    def unknown(self, names: Iterable[str]) -> gym.error.Error:
        """Returns an error that suggests the `names` nearest to the wrapper's name."""
        advice = did_you_mean(self.name, names)
        if self.module == GYMNASIUMS:
            advice += ' Name a wrapper of another package as "module:Wrapper".'
        return gym.error.Error(f"wrapper {self.text!r}: {self.module} has no wrapper {self.name!r}.{advice}")


def _with_tuples(value: Any) -> Any:
    """Returns a JSON value with tuples in place of its lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def check_wrappers(wrappers: Iterable[NamedWrapper], *, here: bool) -> None:
    """Raises if a wrapper does not exist. Call this before workers start.

    Args:
        wrappers: The wrappers.
        here: Whether this process may import their modules. Otherwise another process imports them.

    Raises:
        gymnasium.error.Error: If a module cannot be imported or has no such wrapper.
    """
    for wrapper in wrappers:
        if wrapper.module == GYMNASIUMS:  # not loaded, because some of Gymnasium's wrappers import JAX or PyTorch
            names = set(gym.wrappers.__all__) - {"vector"}
            if wrapper.name not in names:
                raise wrapper.unknown(names)
        elif here or wrapper.module in sys.modules:
            wrapper.load()
        else:
            _check_elsewhere(wrapper.module, wrapper.name)


@functools.cache
def _check_elsewhere(module: str, name: str) -> None:
    text = f"{module}:{name}"
    elsewhere(functools.partial(_load, text), f"wrapper {text!r}", module)


def _load(text: str) -> str:
    NamedWrapper(text).load()
    return text
