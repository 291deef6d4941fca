"""Objects named by strings, "module:Name". Only the processes that build envs import the modules."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import gymnasium as gym

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
            gymnasium.error.Error: If there is no such wrapper. The message names the nearest ones.
        """
        module = import_module(self.module, f"wrapper {self.text!r}")
        wrapper = getattr(module, self.name, None)
        if not callable(wrapper):
            advice = did_you_mean(self.name, module)
            if self.module == GYMNASIUMS:
                advice += ' Name a wrapper of another package as "module:Wrapper".'
            raise gym.error.Error(f"wrapper {self.text!r}: {self.module} has no wrapper {self.name!r}.{advice}")
        try:
            return wrapper(env, **self.kwargs)
        except Exception as error:
            error.add_note(f"The wrapper {self.text!r} raised this error.")
            raise

    def __repr__(self) -> str:
        return f"NamedWrapper({self.text!r})"


def import_module(name: str, what: str) -> ModuleType:
    """Imports a module in this process and returns it.

    Args:
        name: Name of the module.
        what: What the module is imported for, for error messages, such as "env id 'module:id'".

    Raises:
        gymnasium.error.Error: If the module is not installed. Exceptions of the module itself are not caught.
    """
    check_installed(name, what)
    return importlib.import_module(name)


def check_installed(name: str, what: str) -> None:
    """Raises if a module's package is not installed. Imports nothing.

    Raises:
        gymnasium.error.Error: If Python does not find the package.
    """
    package = name.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise gym.error.Error(
            f"{what}: the module {name!r} cannot be imported (No module named {package!r}). Install it, or give a name "
            "without a module."
        )


def did_you_mean(name: str, module: ModuleType) -> str:
    """Returns " Did you mean ...?" with the nearest public names of classes and functions, or "" if none is close."""
    names = {key.lower(): key for key, value in vars(module).items() if callable(value) and key[0] != "_"}
    near = [repr(names[key]) for key in difflib.get_close_matches(name.lower(), names, cutoff=0.5)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _with_tuples(value: Any) -> Any:
    """Returns a JSON value with tuples in place of its lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
