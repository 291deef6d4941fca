"""`dumps`: pickles what the parent sends to workers, including objects of modules that only the parent can import.

cloudpickle pickles classes and functions of imported modules by reference, which is their name. A worker cannot follow
this reference if the module was loaded by `importlib.util.spec_from_file_location`, `runpy` or `types.ModuleType`, or
if its name now leads to a different file. Such modules are pickled by value, like `__main__`, and so are the functions
and classes in them that specs of registered envs name.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from types import FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator

from vecenv import by_value
from vecenv.errors import in_one_line
from vecenv.memory.block import out_of_memory
from vecenv.workers.launch import import_path

# Packages that workers import, and `__main__`, which cloudpickle itself pickles by value.
_KNOWN = ("__main__", "builtins", "cloudpickle", "gymnasium", "numpy", "vecenv")

_lock = threading.RLock()  # cloudpickle's list of modules to pickle by value is global


def _forget_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)  # another thread may have held it during the fork


def dumps(value: Any, remedy: str = "Pass only what can be pickled.", parts: Mapping[str, Any] | None = None) -> bytes:
    """Returns a pickle of a value that workers can load.

    Raises:
        TypeError: If the value cannot be pickled. The message names each step from one of the `parts` of the value (by
            default, the value itself) to the object that is to blame, and ends with the `remedy`. A note names the
            modules that had to be pickled by value.
        SharedMemoryFull: If there is no memory for the pickle.
    """
    return dumps_with_classes(value, remedy, parts)[0]


def dumps_with_classes(value: Any, remedy: str, parts: Mapping[str, Any] | None) -> tuple[bytes, list[type]]:
    """Returns what `dumps` does, and the classes that were pickled by value."""
    importable = Importable()
    try:
        return _dumps(value, importable)
    except MemoryError as error:
        raise out_of_memory(error) from error
    except Exception as error:
        chain = _chain(parts or {"the value": value}, importable)
        told = TypeError(f"{chain} cannot be pickled for the workers ({in_one_line(error)}). {remedy}")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from error


def dumps_or_none(value: Any, importable: Importable | None = None) -> bytes | None:
    """Returns what `dumps` does, or None if the value cannot be pickled, without looking for the object to blame.

    Many calls take less time if they share an `Importable`.
    """
    try:
        return _dumps(value, importable or Importable())[0]
    except Exception:
        return None


def picklable(value: Any, importable: Importable | None = None) -> bool:
    """Returns whether a value can be pickled."""
    return dumps_or_none(value, importable) is not None


def _dumps(value: Any, importable: Importable) -> tuple[bytes, list[type]]:
    stream = io.BytesIO()
    pickler = _Pickler(stream, importable)
    with _lock:
        try:
            pickler.dump(value)
        except Exception as error:
            if pickler.registered:
                names = ", ".join(module.__name__ for module in pickler.registered)
                error.add_note(
                    f"Workers cannot import these modules by their names, so what envs use of them must be pickled: "
                    f"{names}. Give each module the name of its file and put its folder on sys.path."
                )
            raise
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
    return stream.getvalue(), pickler.classes


def _chain(parts: Mapping[str, Any], importable: Importable) -> str:
    """Returns the steps to an object that cannot be pickled: "env_fns[0] (function make) > variable 'lock' (lock)"."""
    steps: list[str] = []
    seen: set[int] = set()

    def is_to_blame(value: Any) -> bool:
        return id(value) not in seen and not picklable(value, importable)

    while found := next(((name, each) for name, each in parts.items() if is_to_blame(each)), None):
        name, value = found
        seen.add(id(value))
        own = getattr(value, "__qualname__", None) if isinstance(value, type | FunctionType | MethodType) else None
        kind = "class" if isinstance(value, type) else type(value).__name__
        steps.append(f"{name} ({kind} {own})" if own else f"{name} ({kind})")
        parts = _parts(value)
    return " > ".join(steps) or next(iter(parts), "the value")


def _parts(value: Any) -> dict[str, Any]:
    """Returns what is pickled together with an object, by name."""
    match value:
        case FunctionType():
            try:
                used = inspect.getclosurevars(value)
            except ValueError:  # a variable that has no value yet
                return {}
            named = {**used.globals, **used.nonlocals}
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            return {
                **{f"variable {name!r}": each for name, each in named.items()},
                **{f"default {i}": each for i, each in enumerate(defaults)},
            }
        case MethodType():
            return {"object": value.__self__}
        case functools.partial():
            named = {**{f"{i}": each for i, each in enumerate(value.args)}, **value.keywords}
            return {"function": value.func, **{f"argument {name!r}": each for name, each in named.items()}}
        case dict():
            return {f"key {key!r}": each for key, each in value.items()}
        case list() | tuple() | set() | frozenset():
            fields = getattr(value, "_fields", None)
            return {f"element {i if fields is None else fields[i]}": each for i, each in enumerate(value)}
    return {f"attribute {name!r}": each for name, each in getattr(value, "__dict__", {}).items()}


class Importable:
    """Tells whether workers can import modules, and remembers its answers: it must not outlive a change of sys.path."""

    def __init__(self) -> None:
        self._found: dict[str, bool] = {}
        self._path: list[str] = []

    def __call__(self, name: str) -> bool:
        """Returns False if workers cannot import a module that this process has loaded, or find it in another file."""
        if name.partition(".")[0] in _KNOWN:
            return True
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> bool:
        module, package = sys.modules.get(name), name.rpartition(".")[0]
        if not isinstance(module, ModuleType):
            return True
        if package and not self(package):
            return False
        path = getattr(sys.modules.get(package), "__path__", ()) if package else None
        found = None
        for finder in sys.meta_path:
            if found is None:
                found = finder.find_spec(name, path)
                # Most modules are in sys.path. Looking at all modules for the rest of the path takes milliseconds.
                if finder is PathFinder and path is None and (found is None or found.origin is None):
                    self._path = self._path or import_path()
                    found = finder.find_spec(name, self._path)
        file = vars(module).get("__file__")
        if found is None:  # extension modules may create submodules, which have no file
            return bool(package) and file is None
        files = [os.path.realpath(each) for each in (file, found.origin) if each and each.endswith(".py")]
        return len(files) < 2 or files[0] == files[1]


class _Pickler(by_value.Pickler):
    """Pickles by value what is defined in modules that workers cannot import."""

    def __init__(self, stream: io.BytesIO, importable: Importable):
        super().__init__(stream)
        self.registered: list[ModuleType] = []
        self._importable = importable

    def reducer_override(self, obj: Any) -> Any:
        if issubclass(type(obj), type | FunctionType | ModuleType | functools._lru_cache_wrapper):
            name = str(obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None))
            registered = cloudpickle.list_registry_pickle_by_value()
            if not self._importable(name) and (module := sys.modules[name]).__name__ not in registered:
                cloudpickle.register_pickle_by_value(module)
                self.registered.append(module)
        elif isinstance(obj, EnvSpec | WrapperSpec) and (names := _names_in_main(obj)):
            reduced: Any = obj.__reduce_ex__(4)
            make, arguments, *state = reduced
            return _with_names_in_main, (names, make, arguments), *state
        elif isinstance(obj, EnvSpec):  # its entry points name modules, which gymnasium.make would import
            creators: dict[str, Any] = {
                name: load_env_creator(entry)
                for name in ("entry_point", "vector_entry_point")
                if isinstance(entry := getattr(obj, name), str) and not self._importable(entry.partition(":")[0])
            }
            if creators:
                return replace(obj, **creators).__reduce_ex__(4)
        return super().reducer_override(obj)


def _names_in_main(spec: EnvSpec | WrapperSpec) -> dict[str, Any]:
    """Returns the names in `__main__` that a spec refers to, such as "__main__:Env", and what they name."""
    entries = [getattr(spec, name, None) for name in ("entry_point", "vector_entry_point")]
    names = [entry.partition(":")[2] for entry in entries if isinstance(entry, str) and entry.startswith("__main__:")]
    main = vars(sys.modules["__main__"])
    return {name: main[name] for name in names if name in main}


def _with_names_in_main(names: Mapping[str, Any], make: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Returns `make(*arguments)`, an object that refers to these names in the `__main__` of this process."""
    vars(sys.modules["__main__"]).update(names)
    return make(*arguments)
