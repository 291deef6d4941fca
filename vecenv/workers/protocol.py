"""The protocol between the parent and its workers: the commands, the types of their payloads, and the encoding.

| message        | sender | payload                      | reply                           | worker is |
|----------------|--------|------------------------------|---------------------------------|-----------|
| START          | parent | `StartCommand`               | READY: `EnvDescription`         | new       |
| ATTACH         | parent | `AttachCommand`              | READY, and again for the block  | idle      |
| RESET s        | parent | `ResetCommand`               | READY: `StepObjects` or nothing | idle      |
| STEP s         | parent | nothing, or actions          | READY: `StepObjects` or nothing | idle      |
| STEP_ROWS s    | parent | `StepRowsCommand`            | READY row, or READY_ROWS        | any       |
| CALL           | parent | `CallCommand`                | READY: one result per env       | idle      |
| APPLY          | parent | `ApplyCommand`               | READY: one result per row       | idle      |
| SET_ATTR       | parent | `SetAttrCommand`             | READY                           | idle      |
| GET_STATE      | parent | nothing                      | READY: one state per env        | idle      |
| SET_STATE s    | parent | one state per env            | READY                           | idle      |
| CLOSE          | parent | nothing                      | READY; the worker exits         | any       |
| READY          | worker | see above                    |                                 | busy      |
| READY_ROWS     | worker | `RowsReply`                  |                                 | busy      |
| ERROR          | worker | `ErrorReply`                 |                                 | busy      |

A frame is a length (4 bytes), a kind (1 byte), a slot (4 bytes) and a pickled payload, or no payload. The length counts
the bytes that follow it. STEP carries actions only if they do not fit in memory, so most steps are 9 bytes each way.

Every reply echoes the slot of its command. In replies to STEP_ROWS, READY carries a row instead; rows that a worker
steps in one call share one READY_ROWS. A worker is busy from the command to its reply. At most one command is in flight
in a pipe, except that a pipe may hold one STEP_ROWS per row of the worker. The constants START to SET_STATE
below say what carries out each command and whether an error in it breaks the vector env.

Order: every row write precedes send(READY); the parent reads rows only after receiving it.
Order: every action write precedes send(STEP or STEP_ROWS); the worker reads actions only after receiving it.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from gymnasium.envs.registration import EnvSpec

from vecenv import by_value
from vecenv.errors import MessageTooLarge, OtherForm
from vecenv.memory.layout import Layout
from vecenv.rows.batched import Batched
from vecenv.rows.messages import EnvDescription, ResetCommand, RowsOptions, StepObjects
from vecenv.rows.rows import Rows
from vecenv.workers.logs import LogSettings
from vecenv.workers.pickling import dumps

FRAME = struct.Struct("!iBI")
"""Length, kind, slot. The length has the format in which `Connection.send_bytes` writes it on POSIX systems."""

HEADER_SIZE = FRAME.size - 4  # bytes of kind and slot: the length of a frame without a payload

MAX_BYTES = 2**31 - 1
"""Size limit of a message in bytes: its length is a signed 32-bit integer."""

Message = tuple[int, int, bytes | bytearray | None]
"""Kind, slot, and the payload for `decode`; None if there is none."""


class Kind(IntEnum):
    """The kind of a message. `COMMANDS` has the record of each command."""

    START = 1
    ATTACH = 2
    RESET = 3
    STEP = 4
    STEP_ROWS = 5
    CALL = 6
    APPLY = 7
    SET_ATTR = 8
    GET_STATE = 9
    SET_STATE = 10
    CLOSE = 11
    READY = 12
    READY_ROWS = 13
    ERROR = 14


READY, READY_ROWS, ERROR = int(Kind.READY), int(Kind.READY_ROWS), int(Kind.ERROR)  # ints, as received in a frame
REPLIES = frozenset((READY, READY_ROWS, ERROR))


class Build(NamedTuple):
    """What a worker needs to build its envs.

    Attributes:
        logs: The parent's configuration of `logging`; None if the worker has inherited it.
        specs: Env specs that the parent has registered, and that envs may need.
        worker_init: A function to call first, or None.
        env_fns, first_env, options: The arguments of `vecenv.rows.batch_rows.make_rows`.
    """

    logs: LogSettings | None
    specs: Sequence[EnvSpec]
    worker_init: Callable[[], object] | None
    env_fns: Sequence[Callable] | Batched
    first_env: int
    options: RowsOptions


@dataclass(frozen=True)
class StartCommand:
    """Builds the envs.

    Attributes:
        environment: The environment variables to set first.
        global_seed: 32-bit words that seed the global generators of `random` and `numpy.random`.
        build: A pickled `Build`. Unpickling it may import modules that read the variables. None if the worker was
            forked from this process, and has inherited a `Build` that need not be picklable.
        classes: Identities of the classes in `build`. The parent keeps these classes alive.
        next_step: See `vecenv.rows.autoreset`. None for rows that are not taken over from a process that died.
    """

    environment: Mapping[str, str]
    global_seed: list[int]
    build: bytes | None
    classes: Container[str]
    next_step: list[int] | None


@dataclass(frozen=True)
class AttachCommand:
    """Attaches a block of memory as the rows `low:high` of `layout`.

    The block follows on the pipe when the worker has replied, because only an empty pipe is certain to have room for a
    descriptor.
    """

    layout: Layout
    low: int
    high: int


StepRowsCommand = list[tuple[int, Any]]
"""Rows to step, each with its action, or None if the action is stored in memory."""


class CallCommand(NamedTuple):
    """Calls the method, or reads the attribute, `name` of every env."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ApplyCommand(NamedTuple):
    """Calls `function(env)` for the envs of these rows."""

    function: Callable[[Any], Any]
    rows: list[int]


class SetAttrCommand(NamedTuple):
    """Sets the attribute `name` of every env, to one value per env."""

    name: str
    values: list[Any]


@dataclass(frozen=True)
class RowsReply:
    """Rows that were stepped in one call, and their objects."""

    rows: list[int]
    objects: StepObjects | None


@dataclass(frozen=True)
class ErrorReply:
    """An exception in a worker, as text: an exception of the env's own type may not survive pickling.

    Attributes:
        traceback: As Python prints it, notes included.
        cause: The exception in one line.
        exception: The pickled exception type; None if it could not be pickled.
        env: Index of the env that raised; None if no single env did.
        doing: What the env was doing, such as "step".
        refusal: The message of a `NotRestorable` or a `SharedMemoryFull`, which is no fault of the env; else None.
        other_form: The exception itself if it is an `OtherForm`; else None.
    """

    traceback: str
    cause: str
    exception: bytes | None
    env: int | None
    doing: str
    refusal: str | None
    other_form: OtherForm | None


P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class CommandType(Generic[P, R]):
    """A command of the table: `CommandType[payload, reply]`. The worker's `CommandServer` has a method for it.

    Attributes:
        kind: Its kind on the wire.
        doing: What a worker does during the command, for messages: "construction", "step", "call".
        between_steps: Whether the command leaves no env in the middle of a step. If so, an error in it does not break
            the vector env, and is raised only after all workers have replied.
    """

    kind: Kind
    doing: str
    between_steps: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class RowsCommandType(CommandType[P, R]):
    """A command to all rows, which `Pool.begin` accepts. The rows carry it out, in a worker or in this process.

    `CommandServer` needs no method for it. It has one for APPLY, which gives each env its own copy of the function.

    Attributes:
        carry_out: Calls the method of the rows: `carry_out(rows, slot, payload)`. Commands that write no rows ignore
            the slot.
    """

    carry_out: Callable[[Rows, int, P], R]


BatchCommandType = RowsCommandType[Any, StepObjects | None]
"""RESET or STEP, which write a batch to a slot."""

START = CommandType[StartCommand, EnvDescription](Kind.START, "construction")
ATTACH = CommandType[AttachCommand, None](Kind.ATTACH, "construction")
STEP_ROWS = CommandType[StepRowsCommand, RowsReply](Kind.STEP_ROWS, "step")
CLOSE = CommandType[None, None](Kind.CLOSE, "close")

RESET = RowsCommandType[ResetCommand, StepObjects | None](
    Kind.RESET, "reset", lambda rows, slot, command: rows.reset(slot, command)
)
STEP = RowsCommandType[Any, StepObjects | None](Kind.STEP, "step", lambda rows, slot, actions: rows.step(slot, actions))
CALL = RowsCommandType[CallCommand, list[Any]](
    Kind.CALL, "call", lambda rows, _, command: rows.call(*command), between_steps=True
)
APPLY = RowsCommandType[ApplyCommand, list[Any]](
    Kind.APPLY, "apply", lambda rows, _, command: rows.apply(*command), between_steps=True
)
SET_ATTR = RowsCommandType[SetAttrCommand, None](
    Kind.SET_ATTR, "set_attr", lambda rows, _, command: rows.set_attr(*command), between_steps=True
)
GET_STATE = RowsCommandType[None, list[dict[str, Any]]](
    Kind.GET_STATE, "get_state", lambda rows, *_: rows.get_state(), between_steps=True
)
SET_STATE = RowsCommandType[Sequence[dict[str, Any]], None](
    Kind.SET_STATE, "set_state", lambda rows, slot, states: rows.set_state(states), between_steps=True
)

COMMANDS: dict[int, CommandType[Any, Any]] = {
    int(command.kind): command
    for command in (START, ATTACH, STEP_ROWS, CLOSE, RESET, STEP, CALL, APPLY, SET_ATTR, GET_STATE, SET_STATE)
}


def doing(kind: int) -> str:
    """Returns what a worker that has received a command of this kind is doing, for messages."""
    return COMMANDS[kind].doing if kind in COMMANDS else f"command {kind}"


short_frame: Callable[[int, int], bytes] = partial(FRAME.pack, HEADER_SIZE)
"""`short_frame(kind, slot)` is the frame of a message without a payload."""


_classes_of_parent: Container[str] = ()  # in a worker: the identities of the classes that came with `Build`


def refer_to_classes(identities: Container[str]) -> None:
    """Lets this worker's replies refer to classes that the parent is certain to know, instead of pickling them."""
    global _classes_of_parent
    _classes_of_parent = identities


def dumps_reply(value: Any) -> bytes:
    """Returns a pickle of a value for the parent of this worker."""
    return by_value.dumps(value, _classes_of_parent)


def encode(kind: Kind, slot: int = 0, payload: Any = None) -> bytes:
    """Returns the frame of one message. A payload of None is not pickled.

    Raises:
        MessageTooLarge: If the message is longer than `MAX_BYTES`.
    """
    if payload is None:
        return short_frame(kind, slot)
    # By value, because envs, arguments and infos may hold lambdas and classes of __main__, which the other process does
    # not import. A reply is first pickled by name, which is faster for arrays, and fails if a name cannot be found.
    # A batch of actions whose dtype is not the space's is pickled in the same way: numbers need no import.
    body = None
    if kind in REPLIES or (type(payload) is np.ndarray and not payload.dtype.hasobject):
        with contextlib.suppress(Exception):
            body = pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)
    if body is None:
        try:
            body = (dumps_reply if kind in REPLIES else dumps)(payload)
        except Exception as error:
            if isinstance(payload, StepObjects) and (keys := _unpicklable(payload)):
                error.add_note(f"The infos under {keys} cannot be pickled: let the env return plain values instead.")
            raise
    size = HEADER_SIZE + len(body)
    if size > MAX_BYTES:
        raise MessageTooLarge(
            f"a {kind.name} message of {size:,} bytes was not sent: the limit is {MAX_BYTES:,}. Pass or "
            "return less data, or have the envs load it themselves."
        )
    return FRAME.pack(size, kind, slot) + body


def _unpicklable(objects: StepObjects) -> list[str]:
    """Returns the keys of the infos that cannot be pickled."""
    found: list[str] = []
    for key, _, values in objects.infos:
        try:
            dumps_reply(values)
        except Exception:
            found.append(key)
    return found


def decode(payload: bytes | bytearray | None) -> Any:
    """Returns the payload that was passed to `encode`. Exceptions raised by unpickling propagate."""
    return None if payload is None else pickle.loads(payload)
