"""Tests of the Atari presets: their envs, evaluations and videos. tests/test_documentation.py trains with them."""

import dataclasses

import numpy as np
import pytest

import ppo
import vecenv
from ppo import Run, evaluate_run
from ppo.envs import env_options, evaluation_config
from tests.ppo.runs import command, untrained_run

pytest.importorskip("ale_py")


@pytest.mark.parametrize("name", ["pong", "breakout"])
def test_training_ends_episodes_with_a_life_and_evaluations_play_whole_games_for_points(name):
    config = ppo.preset(name)
    assert config.env == f"vecenv.atari:Atari/{name.title()}-v5"
    trained, evaluated = env_options(config), env_options(evaluation_config(config))
    assert trained["life_loss_info"] and not evaluated["life_loss_info"]
    assert trained.get("reward_clipping", True) and not evaluated["reward_clipping"]
    assert trained["repeat_action_probability"] == evaluated["repeat_action_probability"] == 0


@pytest.mark.slow  # tests/vecenv/test_atari.py compares the backends
def test_a_policy_scores_the_same_with_either_backend_and_is_filmed(tmp_path, capsys):
    config = ppo.preset("breakout")
    config = dataclasses.replace(
        config, num_workers=0, eval_env_kwargs={**config.eval_env_kwargs, "max_num_frames_per_episode": 400}
    )
    sizes = {name: config.env_kwargs[name] for name in ("img_height", "img_width")}
    env = vecenv.make_single(config.env, **sizes)
    run = untrained_run(tmp_path / "runs", env.observation_space, env.action_space, given=False, **vars(config))
    run, scores = Run.open(run, trust_modules=True), []
    for backend in ("auto", "python"):
        run.write_config(dataclasses.replace(config, backend=backend))
        scores.append(evaluate_run(run, 3, seed=0))
    np.testing.assert_array_equal(scores[0].returns, scores[1].returns)
    assert scores[0].lengths.tolist() == scores[1].lengths.tolist() == [100] * 3

    words = ["--trust-modules", "--episodes", "1", "--outdir", str(tmp_path / "videos")]
    assert command("visualize", [str(run.path), *words]) == 0
    assert "in 100 steps" in capsys.readouterr().out
