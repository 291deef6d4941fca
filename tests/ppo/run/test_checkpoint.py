"""Tests of ppo/run/checkpoint.py: a checkpoint is complete or absent, and damage is detected."""

import os

import numpy as np
import pytest
import tensorflow as tf

from ppo import RunError
from ppo.run import checkpoint
from ppo.run.checkpoint import KEEP, Checkpoints, list_checkpoints, number_in


class Module(tf.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = tf.Variable(tf.fill([100], value))


def saved(folder, *steps):
    module = Module(0.0)
    checkpoints = Checkpoints(folder, module=module)
    for step in steps:
        module.weight.assign(tf.fill([100], float(step)))
        checkpoints.save(step, {"step": step})
    return list_checkpoints(folder)


def restored(folder):
    module, warnings = Module(-1.0), []
    progress = Checkpoints(folder, module=module).restore(warn=warnings.append)
    np.testing.assert_array_equal(module.weight, np.full(100, progress["step"], np.float32))
    return progress["step"], warnings


def test_the_newest_checkpoint_is_restored_and_the_oldest_are_removed(tmp_path):
    paths = saved(tmp_path, *range(1, 7))
    assert [path.name for path in paths] == [f"step_{step:012d}" for step in range(7 - KEEP, 7)]
    assert restored(tmp_path) == (6, [])


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
@pytest.mark.parametrize("part", ["state.index", "state.data-00000-of-00001", "progress.json"])
def test_a_damaged_checkpoint_is_named_and_the_previous_checkpoint_is_restored(tmp_path, part, damage):
    newest = saved(tmp_path, 1, 2)[-1] / part
    content = bytearray(newest.read_bytes())
    if damage == "missing":
        newest.unlink()
    else:
        content[len(content) // 2] ^= 0xFF
        newest.write_bytes({"flip": content, "cut": content[: len(content) // 2], "empty": b""}[damage])
    step, warnings = restored(tmp_path)
    assert step == 1 and len(warnings) == 1 and "step_000000000002: it is damaged" in warnings[0]


def test_the_best_checkpoint_survives_a_kill_while_it_is_replaced(tmp_path, monkeypatch):
    module = Module(0.0)
    checkpoints = Checkpoints(tmp_path, module=module)
    checkpoints.save(1, {"step": 1}, best=True)
    rename = os.rename

    def renamed(source, target):
        if target == tmp_path / "best":
            raise KeyboardInterrupt  # nothing is tidied up, as if the process were killed
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", renamed)
        checkpoints.save(2, {"step": 2}, best=True)
    assert number_in(tmp_path, "best", "step") == 1
    assert checkpoints.restore("best", warn=pytest.fail)["step"] == 1
    for step in (3, 4):
        checkpoints.save(step, {"step": step}, best=True)
    assert number_in(tmp_path, "best", "step") == 4
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_checkpoint_survives_a_kill_while_it_is_replaced(tmp_path, monkeypatch):
    """A second save at the same env-steps adds the states of the envs."""
    module = Module(0.0)
    checkpoints = Checkpoints(tmp_path, module=module)
    checkpoints.save(1, {"step": 1})
    rename = os.rename

    def renamed(source, target):
        if source.name.startswith("part_"):
            raise KeyboardInterrupt  # nothing is tidied up, as if the process were killed
        rename(source, target)

    for save in (1, 2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "rename", renamed)
            checkpoints.save(save, {"step": 0})
        assert checkpoints.restore(warn=pytest.fail)["step"] == checkpoints.restore(1, warn=pytest.fail)["step"] == 1
    checkpoints.save(2, {"step": 2})
    assert checkpoints.restore(warn=pytest.fail)["step"] == 2
    checkpoints.save(1, {"step": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000000001", "step_000000000002"]


def test_restoring_without_an_intact_checkpoint_is_an_error(tmp_path):
    for path in saved(tmp_path, 1, 2):
        (path / "state.index").write_bytes(b"")
    with pytest.raises(RunError, match=r"all 2 are damaged.*start a new run\.$"):
        restored(tmp_path)
    (tmp_path / "best").mkdir()
    with pytest.raises(
        RunError, match=r"The checkpoint 'best' may still be intact: `ppo evaluate RUN --checkpoint best`\.$"
    ):
        restored(tmp_path)
    with pytest.raises(RunError, match="holds no checkpoint"):
        restored(tmp_path / "elsewhere")


def test_a_checkpoint_is_chosen_by_name_or_step_and_the_best_is_kept_beside_the_newest(tmp_path):
    module = Module(0.0)
    checkpoints = Checkpoints(tmp_path, module=module)
    for step in range(1, 7):
        module.weight.assign(tf.fill([100], float(step)))
        if step in (1, 2):  # the second replaces the first
            checkpoints.save(step, {"step": step}, best=True)
        checkpoints.save(step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", *(f"step_{step:012d}" for step in (4, 5, 6))]
    for which, step in (("latest", 6), ("best", 2), ("4", 4), (5, 5)):
        assert checkpoints.restore(which, warn=print)["step"] == module.weight[0] == step
        assert number_in(tmp_path, which, "step") == step
    for missing in ("2", 7, "newest"):
        with pytest.raises(RunError, match=f"holds no checkpoint {missing}: choose one of latest, 4, 5, 6, best. "):
            checkpoints.restore(missing, warn=print)
        assert number_in(tmp_path, missing, "step") is None
    (tmp_path / "best" / "progress.json").write_text("[]")
    assert number_in(tmp_path, "best", "step") is None
    with pytest.raises(RunError, match=r"the checkpoint best in .* cannot be read: choose another one"):
        checkpoints.restore("best", warn=lambda message: None)


def test_a_failed_write_leaves_older_checkpoints_unchanged(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "sync", full)
        with pytest.raises(RunError, match=r"No space left on device.*Older checkpoints are unchanged"):
            saved(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000000001"]
    assert restored(tmp_path) == (1, [])


def test_a_checkpoint_with_variables_of_other_shapes_is_an_error(tmp_path):
    saved(tmp_path, 1)
    other = tf.Module()
    other.weight = tf.Variable(tf.zeros([7]))
    with pytest.raises(RunError, match="from other settings"):
        Checkpoints(tmp_path, module=other).restore(warn=lambda message: None)
