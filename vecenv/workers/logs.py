"""Passes the parent's configuration of `logging`, and the warnings that it ignores, to workers.

Without it, they would drop most of what their envs log, and print warnings that a script has silenced.
Handlers cannot be pickled, so workers build new ones that write to the same places. A handler of an unknown class, such
as one from another package, is replaced by a handler that writes to stderr.
"""

from __future__ import annotations

import fcntl
import logging
import logging.handlers
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import gymnasium as gym

from vecenv.workers.pickling import Importable, dumps_or_none


@dataclass(frozen=True)
class Deferred(logging.Formatter, logging.Filter):
    """A formatter or a filter that a worker unpickles only when a message needs it.

    Unpickling imports the module that defines it. Importing PyTorch, for example, installs a formatter whose module
    takes seconds and 200 MB to import.
    """

    pickled: bytes

    @cached_property
    def _loaded(self) -> Any:
        return pickle.loads(self.pickled)

    def format(self, record: logging.LogRecord) -> str:
        return self._loaded.format(record)

    def filter(self, record: logging.LogRecord) -> Any:
        return getattr(self._loaded, "filter", self._loaded)(record)  # a filter may also be a function


@dataclass(frozen=True)
class HandlerSettings:
    """A handler in a form that can be pickled; `build` returns a new one."""

    make: Callable[[], logging.Handler]
    level: int
    formatter: Deferred | None
    filters: list[Deferred]

    def build(self) -> logging.Handler:
        handler = self.make()
        handler.setLevel(self.level)
        handler.setFormatter(self.formatter)
        for each in self.filters:
            handler.addFilter(each)
        return handler


@dataclass(frozen=True)
class LoggerSettings:
    """The configuration of one logger."""

    level: int
    propagate: bool
    disabled: bool
    handlers: list[HandlerSettings]


@dataclass(frozen=True)
class LogSettings:
    """The configuration of `logging`.

    Attributes:
        disabled: The level up to which `logging.disable` discards all messages.
        loggers: The configuration of each logger, by name. The name of the root logger is None.
        ignored: The arguments of `warnings.filterwarnings` for the warnings that are ignored.
        gymnasium: The lowest level of the warnings that `gymnasium.logger` emits.
    """

    disabled: int
    loggers: dict[str | None, LoggerSettings]
    ignored: list[tuple[Any, ...]]
    gymnasium: int


def log_settings() -> LogSettings:
    """Returns the configuration of this process, which from now on writes at the ends of its log files."""
    loggers: dict[str | None, logging.Logger] = {None: logging.getLogger()}
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            loggers[name] = logger
    found: dict[str | None, LoggerSettings] = {}
    importable = Importable()  # importing PyTorch and TensorFlow adds 42 handlers
    for key, logger in loggers.items():
        settings = [_settings_of(handler, importable) for handler in logger.handlers]
        handlers = [each for each in settings if each is not None]
        if key is None or handlers or logger.level or logger.disabled or not logger.propagate:
            found[key] = LoggerSettings(logger.level, logger.propagate, logger.disabled, handlers)
    return LogSettings(logging.root.manager.disable, found, _ignored_warnings(), gym.logger.min_level)


def configure_logging(settings: LogSettings) -> None:
    """Configures this process, except for the handlers of loggers other than the root."""
    logging.disable(settings.disabled)
    gym.logger.min_level = settings.gymnasium
    for arguments in reversed(settings.ignored):  # each goes before all others
        warnings.filterwarnings(*arguments)
    for name, one in settings.loggers.items():
        logger = logging.getLogger(name)
        logger.setLevel(one.level)
        logger.propagate, logger.disabled = one.propagate, one.disabled
    _add_handlers({None: settings.loggers[None]})


def add_handlers(settings: LogSettings) -> None:
    """Adds the remaining handlers. Call this after modules were imported, which may add handlers to their loggers."""
    _add_handlers(settings.loggers)


def _add_handlers(loggers: dict[str | None, LoggerSettings]) -> None:
    for name, one in loggers.items():
        logger = logging.getLogger(name)
        if not logger.handlers:
            for handler in one.handlers:
                logger.addHandler(handler.build())


def _ignored_warnings() -> list[tuple[Any, ...]]:
    """Returns the filters that ignore warnings, up to the first filter that shows those of all messages and modules.

    Filters of other categories than Python's own do not count: unpickling the category would import its module.
    """
    found = []
    for action, message, category, module, line in warnings.filters:
        if category.__module__ != "builtins":
            continue
        if action != "ignore" and message is None and module is None:
            break
        if action == "ignore":
            patterns = ["" if one is None else getattr(one, "pattern", one) for one in (message, module)]
            found.append((action, patterns[0], category, patterns[1], line))
    return found


def _settings_of(handler: logging.Handler, importable: Importable) -> HandlerSettings | None:
    make: Callable[[], logging.Handler] = partial(_to_stream, "stderr")
    if isinstance(handler, logging.FileHandler):
        if handler.stream is not None:  # with the mode "w", this process would overwrite what workers write
            with suppress(OSError, ValueError):  # it is not a file of the system
                flags = fcntl.fcntl(handler.stream, fcntl.F_GETFL)
                fcntl.fcntl(handler.stream, fcntl.F_SETFL, flags | os.O_APPEND)
        # It reopens the file if another process has renamed it, as RotatingFileHandler does.
        make = partial(logging.handlers.WatchedFileHandler, handler.baseFilename, encoding=handler.encoding, delay=True)
    elif isinstance(handler, logging.StreamHandler):
        if handler.stream in (sys.stdout, sys.__stdout__):
            make = partial(_to_stream, "stdout")
        elif handler.stream not in (sys.stderr, sys.__stderr__):  # an object in the memory of this process
            return None
    elif isinstance(handler, logging.NullHandler):  # without it, Python would print warnings of its logger to stderr
        make = logging.NullHandler
    formatter = None if handler.formatter is None else _deferred(handler.formatter, importable)
    filters = [deferred for each in handler.filters if (deferred := _deferred(each, importable)) is not None]
    return HandlerSettings(make, handler.level, formatter, filters)


def _deferred(used: Any, importable: Importable) -> Deferred | None:
    """Returns None for a formatter or a filter that cannot be pickled."""
    pickled = dumps_or_none(used, importable)
    return None if pickled is None else Deferred(pickled)


def _to_stream(name: str) -> logging.Handler:
    return logging.StreamHandler(getattr(sys, name))
