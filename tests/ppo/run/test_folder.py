"""Tests of ppo/run/folder.py and ppo/run/modules.py: what a run folder can cause Python to import or to write."""

import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
from ppo import Config, Run, RunError, evaluate_run, record_run
from ppo import export as write_export
from ppo.run.modules import modules_of
from ppo.run.scores import Result
from tests.ppo.runs import command, untrained_run, with_reports

EVIL = """
import pathlib, gymnasium
pathlib.Path({mark!r}).touch()
gymnasium.register("Some-v0", lambda **options: gymnasium.make("CartPole-v1", **options))
def network(inputs, num_outputs, seed):
    raise AssertionError("was called")
def wrapper(env):
    return env
"""


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """Returns the folder of a run."""
    env, folder = gym.make("CartPole-v1"), tmp_path_factory.mktemp("strange")
    spaces = env.observation_space, env.action_space
    return untrained_run(folder, *spaces, given=False, env="CartPole-v1", num_workers=0).path


@pytest.fixture
def place(tmp_path, monkeypatch, strange):
    """Returns the current folder, which is first on sys.path, as in a command. A stranger's run is in runs/strange."""
    here = tmp_path / "here"
    shutil.copytree(strange, here / "runs" / "strange")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr("ppo.cli.load_tensorflow", lambda **options: None)
    before = dict(sys.modules)
    yield here
    for name in sys.modules.keys() - before.keys():
        if name.split(".")[0] in ("runs", "evil", "linked", "mine"):
            del sys.modules[name]
    gym.registry.pop("Some-v0", None)


def names(run, **settings):
    """Writes settings into a run's config, as a stranger might."""
    values = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**values, **settings}))


def _flags(trust):
    return ["--trust-modules"] if trust else []


READERS = {
    "evaluate": lambda run, trust: command("evaluate", [str(run), "--episodes", "1", *_flags(trust)]),
    "visualize": lambda run, trust: command("visualize", [str(run), "--episodes", "1", *_flags(trust)]),
    "resume": lambda run, trust: command("train", ["--resume", str(run), *_flags(trust)]),
    "export": lambda run, trust: command("export", [str(run), *_flags(trust)]),
    "load_policy": lambda run, trust: ppo.load_policy(run, trust_modules=trust),
    "evaluate_run": lambda run, trust: evaluate_run(run, 1, trust_modules=trust),
    "record_run": lambda run, trust: record_run(run, run.parent / "videos", 1, trust_modules=trust),
    "export()": lambda run, trust: write_export(run, run.parent / "out", "savedmodel", trust_modules=trust),
    "resume()": lambda run, trust: ppo.resume(run, trust_modules=trust),
}
NEED_NO_ENV = ("export", "export()", "load_policy")


# One reader finds the module in every place, and every reader in one place.
PLACES = [*itertools.product(["env", "network"], ["runs.strange.evil", "linked", "runs.beside"], ["evaluate"])]
PLACES += itertools.product(["env", "network", "wrappers"], ["evil"], READERS)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(("field", "where", "reader"), PLACES)
def test_a_module_in_a_run_folder_or_next_to_it_is_never_imported(place, monkeypatch, reader, field, where, trusted):
    run, mark = place / "runs" / "strange", place / "mark"
    for file in (run / "evil.py", run.parent / "evil.py", run.parent / "beside.py"):
        file.write_text(EVIL.format(mark=str(mark)))
    if where == "evil":
        monkeypatch.syspath_prepend(run.parent)
    (place / "linked.py").symlink_to(run / "evil.py")
    names(run, **{field: {"env": f"{where}:Some-v0", "network": where, "wrappers": ["Autoreset", f"{where}:x"]}[field]})
    if field != "network" and reader in NEED_NO_ENV:
        READERS[reader](run, trusted)
    else:
        with pytest.raises(RunError, match=r"are never imported.* or move the run"):
            READERS[reader](run, trusted)
    assert not mark.exists() and not {where, where.split(".")[0]} & set(sys.modules)


def test_a_module_below_a_package_outside_the_run_folder_is_not_imported_if_it_is_in_the_run_folder(place):
    """The package of the current folder contains the run folder."""
    run, mark = place / "runs" / "strange", place / "mark"
    (place / "mine").mkdir()
    (place / "mine" / "__init__.py").touch()
    run.parent.rename(place / "mine" / "runs")
    run = place / "mine" / "runs" / "strange"
    (run / "evil.py").write_text(EVIL.format(mark=str(mark)))
    (place / "mine" / "linked.py").symlink_to(run / "evil.py")
    for module in ("mine.runs.strange.evil", "mine.linked"):
        names(run, network=f"{module}:network")
        with pytest.raises(RunError, match=r"are never imported"):
            ppo.load_policy(run, trust_modules=True)
    assert not mark.exists() and "mine" not in sys.modules


NAMED = [
    {"env": "mine:Some-v0"},
    {"env": "pettingzoo:mine:network"},
    {"env": "GymV26Environment-v0", "env_kwargs": {"env_id": "mine:Some-v0"}},
    {"network": "mine:network"},
    {"network": "mine"},
    {"wrappers": ["mine:wrapper:{}", "Autoreset"]},
]


# One reader refuses every setting, and every reader refuses one setting of each kind.
REFUSED = [("evaluate", settings) for settings in NAMED]
REFUSED += itertools.product([reader for reader in READERS if reader != "evaluate"], NAMED[::3] + NAMED[-1:])


@pytest.mark.parametrize(("reader", "settings"), REFUSED, ids=str)
def test_a_module_that_only_the_run_names_is_not_imported(place, reader, settings):
    (place / "mine.py").write_text(EVIL.format(mark=str(place / "mark")))
    run = place / "runs" / "strange"
    names(run, **settings)
    if "network" not in settings and reader in NEED_NO_ENV:
        READERS[reader](run, False)
    else:
        with pytest.raises(
            RunError,
            match=r"strange names .*mine.* runs code.* --trust-modules .*, or trust_modules=True .* you called",
        ):
            READERS[reader](run, False)
    assert not (place / "mark").exists() and "mine" not in sys.modules


@pytest.mark.parametrize("reader", READERS)
def test_every_command_and_function_finds_a_run_by_its_name_in_the_folder_runs(place, reader):
    names(place / "runs" / "strange", network="mine:network")
    with pytest.raises(RunError, match=r"runs/strange names network='mine:network'"):
        READERS[reader](Path("strange"), False)


def test_a_module_that_is_already_imported_needs_trust_too(place):
    """A run may name any of its functions, with arguments."""
    call = {"env": "subprocess:run", "env_kwargs": {"args": ["touch", str(place / "mark")]}}
    names(place / "runs" / "strange", **call)
    with pytest.raises(RunError, match="importing subprocess runs code"):
        evaluate_run(place / "runs" / "strange", 1)
    assert "subprocess" in sys.modules and not (place / "mark").exists()


def test_a_command_in_the_run_folder_imports_nothing_from_it(place, monkeypatch):
    run = place / "runs" / "strange"
    (run / "mine.py").write_text(EVIL.format(mark=str(place / "mark")))
    names(run, network="mine:network")
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(run)
    for trust in (False, True):
        with pytest.raises(RunError, match="are never imported"):
            command("export", [".", *_flags(trust)])
    assert not (place / "mark").exists()


def test_this_projects_ids_and_gymnasiums_wrappers_need_no_trust_but_other_uses_of_their_modules_do():
    assert modules_of(Config(env="vecenv.atari:Atari/Pong-v5", wrappers=("Autoreset",))) == {}
    assert modules_of(Config(env="vecenv.robots:Quadruped-v0")) == {}
    for env in ("vecenv.atari.more:Atari/Pong-v5", "vecenv.atari:make", "vecenv.robots:Quadruped"):
        assert modules_of(Config(env=env)) == {f"env='{env}'": env.partition(":")[0]}
    assert list(modules_of(Config(network="vecenv.atari:make")).values()) == ["vecenv.atari"]


@pytest.mark.parametrize("settings", [{"env": "mine:Some-v0"}, {"wrappers": ["mine:wrapper", "mine:wrapper:{}"]}])
@pytest.mark.parametrize("reader", ["evaluate", "visualize", "evaluate_run", "record_run", "resume", "resume()"])
def test_an_env_or_wrappers_that_the_user_trusts_are_imported(place, reader, settings):
    (place / "mine.py").write_text(EVIL.format(mark=str(place / "mark")))
    names(place / "runs" / "strange", **settings, total_steps=2048, eval_episodes=1)
    if reader in ("resume", "resume()"):  # the checkpoint of a run that was not trained lacks the optimizer
        with pytest.raises(RunError, match="from other settings"):
            READERS[reader](place / "runs" / "strange", True)
    else:
        READERS[reader](place / "runs" / "strange", True)
    assert (place / "mark").exists()


@pytest.mark.parametrize("reader", ["evaluate", "evaluate_run", "load_policy", "export", "export()"])
def test_a_network_that_the_user_trusts_is_imported(place, reader):
    (place / "mine.py").write_text(EVIL.format(mark=str(place / "mark")))
    names(place / "runs" / "strange", network="mine:network")
    with pytest.raises(AssertionError, match="was called"):
        READERS[reader](place / "runs" / "strange", True)


def test_settings_of_another_version_are_an_error_that_names_the_version(place):
    run = place / "runs" / "strange"
    names(run, vanished=1)
    (run / "versions.json").write_text(json.dumps({"vecenv-ppo": "0.0.7"}))
    with pytest.raises(RunError, match=r"'vanished'.* vecenv-ppo 0\.0\.7 wrote it, and this is vecenv-ppo \d"):
        ppo.resume(run)
    (run / "versions.json").unlink()
    with pytest.raises(RunError, match="vecenv-ppo of an unknown version wrote it"):
        ppo.load_policy(run)


def test_plot_imports_nothing_and_needs_no_trust(place):
    run = with_reports(Run.open("runs/strange"), [{"env_steps": 1, "wall_s": 1.0, "return_mean": 1.0}])
    names(run.path, env="mine:Some-v0", network="os:system")
    (place / "mine.py").write_text(EVIL.format(mark=str(place / "mark")))
    assert command("plot", [str(run.path)]) == 0
    assert not (place / "mark").exists()


@pytest.mark.parametrize("field", ["env", "network"])
def test_training_with_a_module_in_the_log_folder_is_an_error_at_once(place, field):
    (place / "mine.py").write_text(EVIL.format(mark=str(place / "mark")))
    config = ppo.Config(**{field: "mine:network"})
    with pytest.raises(RunError, match=r"is .*mine\.py.* choose another --logdir"):
        ppo.train(config, logdir=".")
    assert not (place / "mark").exists()


READ = ["spaces.json", "versions.json", "evaluation.json", "metrics.jsonl", "origin.json", "checkpoints/step_9",
        "checkpoints/step_000000000000/progress.json", "checkpoints/step_000000000000/actions.npz",
        "checkpoints/step_000000000000/state.index"]  # fmt: skip
OTHER_READERS = {
    "plot": lambda run, trust: command("plot", [str(run)]),
    "init_from": lambda run, trust: ppo.train(ppo.Config(), init_from=run, logdir=run.parent),
    "the result of a run": lambda run, trust: ppo.load_policy(Result(run, env_steps=0, evaluation=None)),
    "evaluate an open run": lambda run, trust: evaluate_run(Run(run, trust_modules=trust), 1),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("reader", [*READERS, *OTHER_READERS])
def test_no_reader_follows_a_link_or_waits_for_a_pipe(place, reader, kind):
    run, names = place / "runs" / "strange", READ if reader == "load_policy" else READ[:1]
    for name in names:
        (run / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(run / name)
        else:
            (run / name).symlink_to(place / "outside")
        with pytest.raises(RunError, match=f"links or devices: {name}"):
            {**READERS, **OTHER_READERS}[reader](run, True)
        (run / name).unlink()


def test_a_run_that_is_training_can_be_opened(place, monkeypatch):
    """A file can vanish while the folder is being searched, because training replaces checkpoints."""
    monkeypatch.setattr(os, "walk", lambda root: [(str(root), ["vanished"], ["config.json"])])
    assert Run.open(place / "runs" / "strange").read_config()


@pytest.mark.parametrize("reader", ["resume", "resume()"])
@pytest.mark.parametrize("kind", ["file", "new file", "folder", "pipe"])
def test_a_run_folder_from_which_a_write_could_escape_is_not_resumed(place, kind, reader):
    run, outside = place / "runs" / "strange", place / "outside"
    if kind == "folder":
        outside.mkdir()
    elif kind == "file":
        outside.write_text("mine")
    names_of_links = ["config.json.part", "metrics.jsonl", "lock", "evaluation.json", "videos", "checkpoints/step_9"]
    for number, name in enumerate(names_of_links):
        if kind == "pipe":
            os.mkfifo(run / name)
        else:
            (run / name).symlink_to([outside, "../" * (2 + name.count("/")) + "outside"][number % 2])
    before = sorted(run.rglob("*"))
    with pytest.raises(RunError, match="it holds links or devices") as caught:
        READERS[reader](run, False)
    assert all(name in str(caught.value) for name in names_of_links)
    assert sorted(run.rglob("*")) == before
    assert outside.read_text() == "mine" if kind == "file" else outside.exists() == (kind == "folder")


def test_a_resumed_run_writes_through_no_link(tmp_path):
    """Two files are hard links, and the folder itself is reached by a link."""
    config = Config(
        env="CartPole-v1", num_envs=2, num_workers=0, num_steps=16, minibatch_size=32, total_steps=32, eval_episodes=1
    )
    path = ppo.train(config, logdir=tmp_path / "runs").path
    for name in ("metrics.jsonl", "evaluation.json"):
        (tmp_path / name).hardlink_to(path / name)
    before = {name: (tmp_path / name).read_text() for name in ("metrics.jsonl", "evaluation.json")}
    (tmp_path / "link").symlink_to(path)
    assert ppo.resume(tmp_path / "link", total_steps=64).env_steps == 64
    assert Run.open(path).read_config().total_steps == 64
    assert {name: (tmp_path / name).read_text() for name in before} == before
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_run_and_its_products_work_in_folders_with_any_names_even_if_the_current_folder_changes(
    tmp_path, monkeypatch, capsys
):
    """TensorFlow takes `[0.1]` and a backslash in the path of a file to read for a pattern, and ffmpeg takes `-x`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    config = Config(
        env="CartPole-v1", num_envs=2, num_workers=0, num_steps=16, minibatch_size=32, total_steps=64, eval_episodes=1
    )

    class Moves(ppo.Callback):
        def on_start(self, config, env_steps):
            os.chdir(tmp_path / "elsewhere")

    logdir = Path("-lr=[0.1]{a,b}*?\\ \u00e9:\n.")
    path = ppo.train(config, logdir=logdir, callbacks=Moves()).path
    os.chdir(tmp_path)
    path = path.rename(logdir / "[0]")
    warnings = []
    assert ppo.resume(path, total_steps=96).env_steps == 96
    assert "returns/episodes" in EventAccumulator(str(path)).Reload().Tags()["scalars"]
    assert ppo.train(config, logdir=logdir, init_from=path).evaluation is not None
    assert evaluate_run(Run.open(path), 1, warn=warnings.append).returns.size == 1
    assert ppo.load_policy(path)([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    (video,), _ = record_run(Run.open(path), logdir / "videos", 1, warn=warnings.append)
    assert video.stat().st_size > 0 and not warnings
    for format in ("savedmodel", "onnx"):
        exported, difference = write_export(Run.open(path), logdir / "exports", format, warn=warnings.append)
        assert exported.exists() and difference == 0
    (warning,) = warnings
    assert "TensorFlow cannot load from" in warning and warning.endswith(
        "[0].savedmodel, because it takes brackets and backslashes for a pattern: move it"
    )
    capsys.readouterr()
    assert command("plot", [f"./{path}", "--outdir", str(tmp_path / logdir / "plots")]) == 0
    assert len(list((logdir / "plots").iterdir())) == 4
