"""Ranks: processes that train one policy together, each on its own share of the envs.

Each rank collects its own rollout and learns from it as a single process would. After each update, the ranks average
their weights and optimizer moments and merge their running statistics (as local SGD does: Stich, 2019, arXiv
1805.09767), so all of them begin the next rollout with the same policy.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import tensorflow as tf

from ppo.config import Config, ConfigError
from ppo.model.normalize import RunningMoments
from vecenv.ingraph import Rollout

CALL_S = 5.0
"""Seconds that a rank may take to answer a call while the ranks connect."""

_LENGTH = struct.Struct("<q")
"""Precedes each message: its length, `_ALIVE`, or `_LOST - i` if rank i is lost."""

_ALIVE, _LOST = -1, -2
_SILENCES = 4
"""A rank is lost after this many quarters of the timeout without a byte from it."""


class RankLost(ConnectionError):
    """Another rank has ended or does not answer. The message names it."""


class Ranks:
    """This process as the only rank of a run. The subclass `Cluster` is one of several ranks.

    Attributes:
        number: The number of this rank, from 0.
        count: The number of ranks, K.
    """

    number = 0
    count = 1

    def envs(self, config: Config) -> slice:
        """Returns the envs of this rank, as a slice of all N envs."""
        size = config.num_envs // self.count
        return slice(self.number * size, (self.number + 1) * size)

    def messages(self, message: bytes) -> list[bytes]:
        """Returns the messages of all ranks.

        Raises:
            RankLost: If another rank has ended or does not answer.
        """
        return [message]

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of the float64 arrays of all ranks, bit for bit the same on each. Raises as `messages`."""
        return values

    def gathered(self, values: np.ndarray) -> np.ndarray:
        """Returns the float64 arrays of all ranks, `[K, ...]`. They have the same shape on all ranks."""
        content = self.messages(values.astype(np.float64).tobytes())
        return np.stack([np.frombuffer(one).reshape(values.shape) for one in content])

    def texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks."""
        return [message.decode() for message in self.messages(text.encode())]

    def any(self, condition: bool) -> bool:
        """Returns whether the condition holds on any rank."""
        return any(map(bool, self.gathered(np.array(float(condition)))))


class Cluster(Ranks):
    """One of several ranks. Rank 0 listens at its address, and each other rank has one connection to it.

    The constructor waits until all ranks are connected.

    Args:
        addresses: "host:port" of each rank. Only that of rank 0 is used, except in messages.
        number: The number of this rank.
        start_s: Seconds to wait for the other ranks to start.
        timeout_s: Seconds after which a rank that sends nothing counts as lost. While this process is suspended, they
            do not count.

    Raises:
        ConfigError: If rank 0 cannot listen at its address.
        ConnectionError: If other ranks have not started in time. The message names them.
    """

    def __init__(self, addresses: Sequence[str], number: int, *, start_s: float, timeout_s: float):
        self.number, self.count = number, len(addresses)
        self._addresses, self._quarter = addresses, timeout_s / _SILENCES
        self._peers: dict[int, socket.socket] = {}  # on rank 0 all others, on the others rank 0
        self._closed = threading.Event()
        if number == 0:
            self._accept_all(start_s)
        else:
            self._peers[0] = self._called(start_s)
        for peer in self._peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(self._quarter)
        self._sending = {peer: threading.Lock() for peer in self._peers}
        # A rank that evaluates or saves sends nothing else for minutes.
        threading.Thread(target=self._say_that_this_rank_lives, daemon=True).start()

    def messages(self, message: bytes) -> list[bytes]:
        if self.number > 0:
            self._send(0, message)
            return [self._receive(0) for _ in range(self.count)]
        found = [message, *map(self._receive, range(1, self.count))]
        for one in found:
            for peer in self._peers:
                self._send(peer, one)
        return found

    def sum(self, values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float64)
        if self.number > 0:
            self._send(0, values.tobytes())
            return np.frombuffer(self._receive(0))
        for peer in range(1, self.count):
            values = values + np.frombuffer(self._receive(peer))
        content = values.tobytes()
        for peer in self._peers:
            self._send(peer, content)
        return values

    def close(self) -> None:
        """Closes the connections."""
        self._closed.set()
        for peer, connection in self._peers.items():
            with self._sending[peer]:
                connection.close()

    def _send(self, peer: int, message: bytes) -> None:
        view, silences = memoryview(_LENGTH.pack(len(message)) + message), 0
        with self._sending[peer]:
            while view:
                try:
                    view, silences = view[self._peers[peer].send(view) :], 0
                except TimeoutError:  # the peer does not read yet, but it may be busy
                    silences = 0 if self._lives(peer) else silences + 1
                    if silences == _SILENCES:
                        raise self._lost(peer) from None
                except OSError as error:
                    raise self._lost(peer) from error

    def _lives(self, peer: int) -> bool:
        """Returns whether a peer has said that it lives since the last call, or since its last message."""
        alive, connection, found = _LENGTH.pack(_ALIVE), self._peers[peer], False
        while select.select([connection], [], [], 0)[0] and connection.recv(len(alive), socket.MSG_PEEK) == alive:
            connection.recv(len(alive))
            found = True
        return found

    def _receive(self, peer: int) -> bytes:
        """Returns the next message of a rank."""
        while (length := _LENGTH.unpack(self._read(peer, _LENGTH.size))[0]) == _ALIVE:
            pass
        if length <= _LOST:
            raise self._lost(_LOST - length)
        return bytes(self._read(peer, length))

    def _read(self, peer: int, size: int) -> bytearray:
        data, silences = bytearray(size), 0
        view = memoryview(data)
        while view:
            try:
                count = self._peers[peer].recv_into(view)
            except TimeoutError:
                count, silences = 0, silences + 1
                if silences < _SILENCES:
                    continue
            except OSError:
                count = 0
            if not count:
                raise self._lost(peer)
            view, silences = view[count:], 0
        return data

    def _lost(self, rank: int) -> RankLost:
        """Tells the other ranks that a rank is lost, and returns the error."""
        if self.number == 0:
            for peer, connection in self._peers.items():
                if peer != rank:
                    with suppress(OSError), self._sending[peer]:
                        connection.sendall(_LENGTH.pack(_LOST - rank))
        return RankLost(
            f"rank {rank} of {self.count} ({self._addresses[rank]}) has ended or does not answer, so rank "
            f"{self.number} cannot continue. Unless --restarts or a scheduler restarts all ranks, start them again, "
            "with --resume if the run has a checkpoint."
        )

    def _say_that_this_rank_lives(self) -> None:
        while not self._closed.wait(self._quarter / 2):
            for peer, connection in self._peers.items():
                if self._sending[peer].acquire(blocking=False):  # a message in progress says the same
                    with suppress(OSError):  # whoever waits for this peer finds out
                        connection.sendall(_LENGTH.pack(_ALIVE))
                    self._sending[peer].release()

    def _accept_all(self, start_s: float) -> None:
        polls_left = start_s  # of a second each; not a clock, which also runs while this process is suspended
        with _listener(self._addresses[0]) as listener:
            listener.settimeout(1.0)
            while missing := [rank for rank in range(1, self.count) if rank not in self._peers]:
                try:
                    caller, _ = listener.accept()
                except TimeoutError:
                    polls_left -= 1
                    if polls_left < 0:
                        named = ", ".join(f"rank {rank} ({self._addresses[rank]})" for rank in missing)
                        raise ConnectionError(
                            f"rank 0 has waited {start_s:g} s for {named}. Start all ranks within this time, and check "
                            f"that they can reach rank 0 at {self._addresses[0]}."
                        ) from None
                    continue
                rank = self._greeted(caller)
                if rank in missing:
                    self._peers[rank] = caller
                else:
                    caller.close()  # a stranger

    def _greeted(self, caller: socket.socket) -> int | None:
        """Answers a call; returns the number of the rank that calls, or None for a stranger."""
        with suppress(OSError):
            caller.settimeout(CALL_S)
            greeting = caller.recv(64)
            for rank in range(1, self.count):
                if greeting == self._greeting(rank):
                    caller.sendall(self._greeting(0))
                    return rank
        return None

    def _called(self, start_s: float) -> socket.socket:
        """Returns a connection to rank 0."""
        polls_left = start_s
        while polls_left > 0:
            with suppress(OSError):
                peer = socket.create_connection(_split(self._addresses[0]), timeout=CALL_S)
                peer.sendall(self._greeting(self.number))
                if peer.recv(64) == self._greeting(0):
                    return peer
                peer.close()
            time.sleep(0.1)
            polls_left -= 0.1
        raise ConnectionError(
            f"rank {self.number} has waited {start_s:g} s for rank 0 ({self._addresses[0]}). Start all ranks within "
            "this time, and check that this machine can reach that address."
        )

    def _greeting(self, rank: int) -> bytes:
        return f"ppo rank {rank} of {self.count}\n".encode()


def _listener(address: str) -> socket.socket:
    host, port = _split(address)
    dual = socket.has_dualstack_ipv6() and not _is_local(host)
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("127.0.0.1" if _is_local(host) else "", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at {address}: {error.strerror}. Choose another port in the cluster's spec."
        ) from error


def _is_local(host: str) -> bool:
    """Returns whether only this machine can use an address, which the listener must then not offer to others."""
    return host in ("localhost", "127.0.0.1")


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    try:
        return host.strip("[]"), int(port)
    except ValueError as error:
        raise ConfigError(f"{address!r} is not a valid rank address: use HOST:PORT") from error


class Exchange:
    """Combines what the ranks have learned in an update: means of the variables, and exactly merged statistics.

    Args:
        ranks: The ranks.
        modules: The modules that an update changes.
        own: Variables with an element for each env. A rank changes only those of its own envs, so they are not
            averaged.
    """

    def __init__(self, ranks: Ranks, modules: Sequence[tf.Module], own: Sequence[tf.Variable]):
        self._ranks, self._own = ranks, own
        submodules = [part for module in modules for part in (module, *module.submodules)]
        self._moments = [part for part in submodules if isinstance(part, RunningMoments)]
        apart = {variable.ref() for variable in (*own, *(v for part in self._moments for v in part.variables))}
        variables = {variable.ref(): variable for module in modules for variable in module.variables}
        self._variables = [variable for ref, variable in variables.items() if ref not in apart]
        self._before: list[tuple[np.ndarray, ...]] = []

    def begin(self) -> None:
        """Remembers the statistics before an update, which are the same on all ranks."""
        if self._ranks.count > 1:
            self._before = [_values(moments) for moments in self._moments]

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Combines the results of the update, and returns the means of its metrics. Raises as `Ranks.messages`."""
        if self._ranks.count == 1:
            return dict(metrics)
        averaged = [variable.numpy().astype(np.float64) for variable in self._variables]
        # Sums over the samples of the update, relative to the mean before it, which add up over the ranks.
        sums = [
            part
            for moments, (count, mean, variance) in zip(self._moments, self._before, strict=True)
            for part in _sums(*_values(moments), count, mean, variance)
        ]
        parts = [*averaged, *sums, np.array([*metrics.values()])]
        total = self._ranks.sum(np.concatenate([np.ravel(part) for part in parts]))
        ends = np.cumsum([part.size for part in parts])[:-1]
        found = [one.reshape(part.shape) for one, part in zip(np.split(total, ends), parts, strict=True)]
        for variable, value in zip(self._variables, found, strict=False):
            variable.assign((value / self._ranks.count).astype(variable.dtype.as_numpy_dtype))
        rest = iter(found[len(averaged) :])
        for moments, (count, mean, variance) in zip(self._moments, self._before, strict=True):
            added, first, second = next(rest), next(rest), next(rest)
            whole = count + added
            shift = first / np.maximum(whole, 1.0)
            moments.count.assign(whole)
            moments.mean.assign(mean + shift)
            if whole:
                moments.variance.assign((count * variance + second) / whole - np.square(shift))
        return dict(zip(metrics, (next(rest) / self._ranks.count).tolist(), strict=True))

    def complete(self, envs: slice) -> None:
        """Completes the variables of single envs, of which this rank has changed only those of `envs`."""
        for variable in self._own if self._ranks.count > 1 else ():
            parts = self._ranks.gathered(variable.numpy()[envs])
            variable.assign(np.concatenate(list(parts)).astype(variable.dtype.as_numpy_dtype))

    def episodes(self, rollout: Rollout) -> Rollout:
        """Returns the ends of episodes in the rollouts of all ranks, `[T, N]`, with the other fields of `rollout`."""
        if self._ranks.count == 1:
            return rollout
        infos = rollout.episode_infos
        columns = [rollout.terminated, rollout.truncated, rollout.episode_returns, rollout.episode_lengths]
        own = np.stack([*columns, *infos.values()]).astype(np.float64)
        terminated, truncated, returns, lengths, *others = np.concatenate(list(self._ranks.gathered(own)), axis=-1)
        return rollout._replace(
            terminated=terminated.astype(bool),
            truncated=truncated.astype(bool),
            episode_returns=returns,
            episode_lengths=lengths.astype(np.int64),
            episode_infos=dict(zip(infos, others, strict=True)),
        )


def _values(moments: RunningMoments) -> tuple[np.ndarray, ...]:
    return tuple(variable.numpy() for variable in (moments.count, moments.mean, moments.variance))


def _sums(
    count: np.ndarray, mean: np.ndarray, variance: np.ndarray, *before: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns number, sum and sum of squares of the samples since `before`, relative to the mean before."""
    old_count, old_mean, old_variance = before
    shift = mean - old_mean
    return count - old_count, count * shift, count * (variance + np.square(shift)) - old_count * old_variance
