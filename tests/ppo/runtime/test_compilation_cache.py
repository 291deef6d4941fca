"""What XLA compiles is kept for later runs, and whatever is wrong with the files costs only the compilation."""

import contextlib
import os
import resource
import subprocess
import sys

import pytest
import tensorflow as tf

from ppo.runtime import compilation_cache as cache

CONTENT = b"compiled" * 1000

COMPILE = """
from ppo.runtime import compilation_cache, startup
startup.load_tensorflow()
import tensorflow as tf
loaded = len(compilation_cache._stored)
print(loaded, tf.function(lambda x: tf.reduce_sum(tf.sin(x @ x)), jit_compile=True)(tf.ones([8, 8])).numpy())
compilation_cache.publish()
"""


def start(folder, **variables):
    """Starts a process that compiles a function, and prints the number of entries that it loaded and the result."""
    environ = {name: value for name, value in os.environ.items() if name not in ("TF_XLA_FLAGS", "XLA_FLAGS")}
    environ |= {"XDG_CACHE_HOME": str(folder), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output(process):
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return stdout.split()


@pytest.fixture
def new_process(tmp_path, monkeypatch):
    """Returns a function after whose call this module behaves as in a new process. The folder is in `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    count = 0

    def begin(key="key"):
        nonlocal count
        count += 1
        monkeypatch.setattr(cache, "_IN_MEMORY", f"ram://{tmp_path.name}-{count}")
        monkeypatch.setattr(cache, "_key", key)
        monkeypatch.setattr(cache, "_stored", set())
        cache.load()

    begin()
    return begin


def compile_as(name, content=CONTENT):
    """Stores an entry where XLA does."""
    tf.io.gfile.makedirs(cache._IN_MEMORY)
    with tf.io.gfile.GFile(f"{cache._IN_MEMORY}/{name}", "wb") as file:
        file.write(content)


def in_memory():
    return set(tf.io.gfile.listdir(cache._IN_MEMORY)) if tf.io.gfile.isdir(cache._IN_MEMORY) else set()


def test_entries_of_one_process_are_those_of_the_next(new_process, tmp_path):
    compile_as("a")
    cache.publish()
    assert (tmp_path / "vecenv-ppo").stat().st_mode & 0o777 == 0o700
    new_process()
    with tf.io.gfile.GFile(f"{cache._IN_MEMORY}/a", "rb") as file:
        assert file.read() == CONTENT
    new_process("key of another processor")
    assert in_memory() == set()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "longer", "renamed", "link", "pipe", "folder"])
def test_a_damaged_entry_is_not_loaded_and_is_replaced(new_process, tmp_path, damage):
    compile_as("a")
    cache.publish()
    (file,) = (tmp_path / "vecenv-ppo").iterdir()
    content = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "longer":
        file.write_bytes(content + b"\0")
    elif damage == "renamed":  # an entry of another program
        file = file.rename(file.with_name("key-b"))
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.unlink()
        os.mkfifo(file) if damage == "pipe" else file.mkdir()
    new_process()
    assert in_memory() == set()
    compile_as("a")
    cache.publish()
    new_process()
    assert in_memory() == (set() if damage == "folder" else {"a"})


@contextlib.contextmanager
def full_disk():
    """Lets every write to a file fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_costs_the_entry(new_process, tmp_path):
    compile_as("a")
    with full_disk():
        cache.publish()
    assert list((tmp_path / "vecenv-ppo").iterdir()) == []
    new_process()
    assert in_memory() == set()


@pytest.mark.parametrize("home", ["/proc", "relative", "/dev/null"], ids=["read-only", "missing", "a file"])
def test_a_home_that_cannot_be_written_costs_the_entry(new_process, tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    new_process()
    compile_as("a")
    cache.publish()
    assert list(tmp_path.rglob("*a")) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_folder_that_others_may_enter_is_not_used(new_process, tmp_path, mode):
    compile_as("a")
    cache.publish()
    (tmp_path / "vecenv-ppo").chmod(mode)
    new_process()
    compile_as("b")
    cache.publish()
    assert "a" not in in_memory()
    assert [file.name for file in (tmp_path / "vecenv-ppo").iterdir()] == ["key-a"]


def test_a_folder_of_another_user_is_not_used(new_process, monkeypatch):
    compile_as("a")
    cache.publish()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    new_process()
    assert in_memory() == set()


def test_a_link_to_a_folder_is_not_used(new_process, tmp_path):
    compile_as("a")
    cache.publish()
    (tmp_path / "vecenv-ppo").rename(tmp_path / "elsewhere")
    (tmp_path / "vecenv-ppo").symlink_to(tmp_path / "elsewhere")
    new_process()
    assert in_memory() == set()


def test_the_oldest_entries_are_removed_above_the_limit(new_process, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MAX_BYTES", 3 * len(CONTENT))
    for time, name in enumerate("abcd"):
        compile_as(name)
        cache.publish()
        if name != "d":
            os.utime(tmp_path / "vecenv-ppo" / f"key-{name}", (time, time))
    compile_as("too large", CONTENT * 4)
    cache.publish()
    assert sorted(file.name for file in (tmp_path / "vecenv-ppo").iterdir()) == ["key-c", "key-d"]


def test_the_key_depends_on_the_processor_and_the_threads(monkeypatch):
    processor = cache._processor()
    before = cache._key_for(processor)
    assert cache._key_for(processor) == before != cache._key_for(processor.replace("sse2", "sse9") + " ")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "77")
    assert cache._key_for(processor) != before


def test_the_flags_of_a_user_and_the_variable_turn_the_cache_off(monkeypatch):
    monkeypatch.setattr(cache, "_key", None)
    for name in ("TF_XLA_FLAGS", "XLA_FLAGS", cache.OFF):
        with monkeypatch.context() as only:
            for other in ("TF_XLA_FLAGS", "XLA_FLAGS"):
                only.delenv(other, raising=False)
            only.setenv(name, "0")
            with cache.in_memory():
                assert os.environ.get("TF_XLA_FLAGS") == ("0" if name == "TF_XLA_FLAGS" else None)
            assert cache._key is None


def test_processes_at_once_share_what_they_compile_and_xla_uses_it(tmp_path):
    first, second = [output(process) for process in [start(tmp_path), start(tmp_path)]]
    assert first[1] == second[1]
    files = list((tmp_path / "vecenv-ppo").iterdir())
    assert len(files) == 1
    assert output(start(tmp_path)) == ["1", first[1]]


@pytest.mark.slow
def test_xla_fails_on_a_damaged_entry_unless_its_digest_says_so(tmp_path):
    _, result = output(start(tmp_path))
    (file,) = (tmp_path / "vecenv-ppo").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-200])
    assert output(start(tmp_path)) == ["0", result]
    assert len(file.read_bytes()) == len(content)  # it was compiled and stored again
    damaged = content[32:-200]
    file.write_bytes(cache._digest(file.name.partition("-")[2], damaged) + damaged)
    process = start(tmp_path)
    process.communicate()
    assert process.returncode != 0  # so XLA reads the entries of the folder
