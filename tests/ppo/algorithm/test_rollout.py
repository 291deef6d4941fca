"""Tests of ppo/algorithm/rollout.py: rollouts stay on the host, whatever device runs the update."""

import subprocess
import sys

import pytest

# A second CPU device stands in for a GPU: the program makes it the default for every op that is not pinned.
PROGRAM = """
import sys
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # the graph is checked, not its speed
import ppo.trainer
from ppo.algorithm import update
from ppo.model.agent import Agent
from ppo.callbacks import Callbacks
from ppo.config import Config
from ppo.collectors import collector_for
from ppo.run.folder import Run

def device(name):
    return tf.DeviceSpec.from_string(name).device_index

update.compiles_updates = False  # XLA supports only one CPU device
Agent.on_host = property(lambda self: all(device(v.device) == 0 for v in self.variables))
config = Config(env="CartPole-v1", num_envs=4, num_workers=0, num_steps=8, minibatch_size=16, epochs=1, eval_episodes=2,
                recurrent=sys.argv[1], total_steps=96)
with tf.device("/CPU:1"), collector_for(config, None, None, None, print) as collector:
    run = Run.create(sys.argv[2], "run", config)
    run.write_spaces(collector.spaces, given=False)
    trainer = ppo.trainer.Trainer(config, run, collector, Callbacks([]))
    trainer.begin()
    (team,) = trainer.teams
    before = [v.numpy() for v in team.agent.learned]
    for _ in range(2):
        trainer.learn(trainer.collect())
    assert any((v.numpy() != then).any() for v, then in zip(team.agent.learned, before)), "nothing was learned"
    assert all(device(v.device) == 1 for v in team.agent.learned), "a learned weight is not on the update's device"
    acted = []
    actor = team.actor
    actor._act = lambda *arguments, act=actor._act: acted.append(act(*arguments)) or acted[-1]
    trainer.evaluate()
    assert all(device(output.device) == 0 for outputs in acted for output in outputs), "the policy acts off the host"
    for mine, theirs in zip(actor.variables, team.agent.variables):
        assert device(mine.device) == 0 and (mine.numpy() == theirs.numpy()).all(), mine.name
    (collect,) = trainer.collector.collect_in_graph._list_all_concrete_functions()
    assert all(device(captured.device) == 0 for captured in collect.captured_inputs), "a variable is not on the host"
    graph = collect.graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    computed = [node for node in nodes if node.op in ("MatMul", "Tanh", "ArgMax")]
    assert len({node.op for node in computed}) == 3
    elsewhere = {(node.op, node.name, node.device) for node in computed if "CPU:0" not in node.device}
    assert not elsewhere, elsewhere
    trainer.saver.save()
    trainer.close()
print("all on the host")
"""


@pytest.mark.parametrize("recurrent", ["none", pytest.param("gru", marks=pytest.mark.slow)])
def test_with_an_accelerator_rollouts_stay_on_the_host_and_fetch_no_weights_during_steps(tmp_path, recurrent):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, recurrent, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "all on the host" in done.stdout, done.stderr[-3000:]
