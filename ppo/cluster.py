"""Ray: starting it on this machine for one run, or joining a cluster."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import vecenv
from ppo.config import ConfigError
from ppo.errors import first_line

LOSS_S = 600  # seconds that this process survives without Ray's head, so that the run can be saved; Ray's default is 60

DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the behavior that Ray otherwise announces as its future default
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of the other actors, after an error of one of them
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(LOSS_S),
}
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If this variable is "0", processes of Ray listen on the loopback interface alone, as they do by default on macOS."""

AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")

STARTS = 2  # attempts to start Ray, which gives up after 30 seconds on a busy machine
CONNECT_S = 10.0  # seconds in which the head node of a cluster must accept a connection
MAX_PATH = 36  # characters of Ray's folder; the sockets in it have names of up to 107 characters

REMOVE = """
import os, shutil, sys, time
sys.stdin.buffer.read()  # returns when the run has ended, even if it was killed
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)  # processes of Ray that are still ending write to it
"""


@contextmanager
def cluster(address: str | None, actors: int, warn: Callable[[str], None]) -> Iterator[int]:
    """Starts Ray on this machine or joins a cluster, and yields how many cores each of `actors` equal actors can have.

    If this process has already initialized Ray, its cluster is used and stays connected. Ray replaces the handler of
    SIGTERM, which is restored.

    Args:
        address: Address of a cluster's head node, "host:port"; "auto" for the cluster of this machine; None to start
            Ray, or to join the cluster that the variable RAY_ADDRESS names.
        actors: Number of actors.
        warn: Called with a message if anyone who reaches the cluster can use it.

    Raises:
        ConfigError: If Ray is not installed, cannot be started or reached, or has too few cores.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"collectors need Ray: pip install 'vecenv-ppo[ray]' ({error})") from error
    connected: AbstractContextManager[None] = nullcontext()
    if not ray.is_initialized():
        connected = _connected(ray, address, actors, warn)
    with connected:
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        yield cores_of_each(nodes, actors)


@contextmanager
def _connected(ray: ModuleType, address: str | None, actors: int, warn: Callable[[str], None]) -> Iterator[None]:
    """Connects to a cluster for the duration of the block."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address is None:
        with _folder() as folder, _restored(*AUTHENTICATION):
            _start(ray, folder, max(actors, vecenv.available_cores()), quiet)
            try:
                yield
            finally:
                ray.shutdown()
        return
    if address.startswith("ray://"):
        raise ConfigError(
            f"--cluster {address} is the address of a Ray client server: run the command on a machine of the cluster, "
            "for example with `ray job submit`, and use --cluster auto"
        )
    host, _, port = address.rpartition(":")
    if port.isdecimal():  # Ray would try for minutes
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            raise ConfigError(
                f"cannot join the Ray cluster at {address}: {error}. Check the address, and that the head "
                "node is running."
            ) from error
    try:
        _init(ray, address=address, **quiet)
    except Exception as error:  # Ray raises exceptions of many types
        raise ConfigError(
            f"cannot join the Ray cluster at {address}: {first_line(error)}. Check the address, that this machine "
            "belongs to the cluster (`ray status`), and, if the cluster demands a token, that RAY_AUTH_MODE=token is "
            "set here, too."
        ) from error
    try:
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            warn(
                f"the Ray cluster at {address} does not use token authentication, so anyone who can reach its ports "
                "can run code on all of its machines. Use a private network, or set RAY_AUTH_MODE=token on all nodes."
            )
        yield
    finally:
        ray.shutdown()


def _start(ray: ModuleType, folder: str, num_cpus: int, quiet: dict[str, Any]) -> None:
    """Starts Ray so that neither other machines nor other users of this machine can reach it."""
    if "RAY_AUTH_MODE" not in os.environ:  # Ray then demands a token, which it would write to the home folder
        os.environ.setdefault("RAY_AUTH_TOKEN", _token())
    options = {"num_cpus": num_cpus, "num_gpus": 0, "include_dashboard": False, "_temp_dir": folder, **quiet}
    for attempt in range(1, STARTS + 1):
        try:
            with _loopback_only():
                _init(ray, address="local", **options)
            break
        except Exception as error:  # Ray raises exceptions of many types
            ray.shutdown()
            if attempt == STARTS:
                raise ConfigError(
                    f"Ray could not be started on this machine in {STARTS} attempts: {first_line(error)}. If the "
                    "machine is busy, try again later; otherwise, train without collectors."
                ) from error
    if (host := ray.util.get_node_ip_address()) != "127.0.0.1":
        ray.shutdown()
        raise ConfigError(
            f"Ray {ray.__version__} listens at {host}, where other machines can reach it: use another version of Ray, "
            "or start a cluster (`ray start --head`) and pass its address"
        )


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Makes Ray start servers that only this machine can reach."""
    from ray._private import ray_constants  # read from the variable when Ray was imported

    enabled = ray_constants.ENABLE_RAY_CLUSTER
    with _restored(LOOPBACK):
        os.environ[LOOPBACK], ray_constants.ENABLE_RAY_CLUSTER = "0", False
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = enabled


@contextmanager
def _restored(*names: str) -> Iterator[None]:
    """Restores environment variables after the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@functools.cache
def _token() -> str:
    """Returns a random token. There is one per process, because Ray remembers the first one that it reads."""
    return secrets.token_hex(32)


@contextmanager
def _folder() -> Iterator[str]:
    """Yields a folder for the files of Ray. Another process removes it when this process ends, even if it is killed."""
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="ppo-", dir=parent if len(parent) + len("/ppo-12345678") <= MAX_PATH else "/tmp")
    command = [sys.executable, "-c", REMOVE, folder]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _init(ray: ModuleType, **options: Any) -> None:
    """Calls `ray.init`, and restores the handler of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    finally:
        # None is a handler that was installed from C, which Python cannot restore.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def cores_of_each(nodes: Sequence[int], actors: int) -> int:
    """Returns the largest number of cores that each actor can reserve so that all actors fit on nodes with these cores.

    Raises:
        ConfigError: If there are fewer cores than actors.
    """
    fitting = [cores for cores in range(1, max(nodes, default=0) + 1) if sum(n // cores for n in nodes) >= actors]
    if not fitting:
        raise ConfigError(
            f"{actors} collectors need a core each, but the Ray cluster has {sum(nodes)}: use fewer collectors, or add "
            "nodes"
        )
    return max(fitting)
