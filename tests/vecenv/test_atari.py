"""Tests of vecenv/atari.py: single games return what ale-py's vector env returns, bit for bit."""

import importlib
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import assert_same
from vecenv.testing import check_vector_env

pytest.importorskip("ale_py")

SAME_STEP = {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}
SMALL = {"frameskip": 1, "img_height": 50, "img_width": 60, "max_num_frames_per_episode": 40}
COLOR = {"grayscale": False, "stack_num": 2, "frameskip": 3, "noop_max": 0, "reward_clipping": False}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("game", "kwargs", "mode"),
    [
        slow("Breakout", {"max_num_frames_per_episode": 400}, "SameStep"),
        slow("Breakout", {"max_num_frames_per_episode": 400}, "NextStep"),
        ("Breakout", {"episodic_life": True, "repeat_action_probability": 0.0}, "SameStep"),
        slow("Breakout", {"episodic_life": True, "repeat_action_probability": 0.0}, "NextStep"),
        slow("Breakout", {"life_loss_info": True}, "SameStep"),  # the vector env needs SameStep
        slow("Pong", {"full_action_space": True, **SMALL}, "SameStep"),
        ("Pong", {"full_action_space": True, **SMALL}, "NextStep"),
        slow("Qbert", {"episodic_life": True, "use_fire_reset": False, **COLOR}, "SameStep"),
        slow("Qbert", {"episodic_life": True, "use_fire_reset": False, **COLOR}, "NextStep"),
        slow("SpaceInvaders", {"life_loss_info": True, "max_num_frames_per_episode": 240, **COLOR}, "SameStep"),
    ],
    ids=str,
)
def test_single_games_equal_the_vector_env(game, kwargs, mode):
    name, options = f"vecenv.atari:Atari/{game}-v5", {"vector_kwargs": {"autoreset_mode": mode}, **kwargs}
    with vecenv.make(name, 2, 0, **options) as fast, vecenv.make(name, 2, 0, backend="python", **options) as slow:
        assert fast.single_observation_space == slow.single_observation_space
        assert fast.single_action_space == slow.single_action_space
        rng, num_ended, rewarded = np.random.default_rng(0), 0, False
        for seed in (0, None, 123):
            assert_same(fast.reset(seed=seed)[0], slow.reset(seed=seed)[0])
            for _ in range(120):
                actions = rng.integers(fast.single_action_space.n, size=2)
                *results, infos = fast.step(actions)
                *expected, expected_infos = slow.step(actions)
                assert_same(tuple(results), tuple(expected))
                assert infos["lives"].tolist() == expected_infos["lives"].tolist()
                ended = np.flatnonzero(results[2] | results[3])
                for env in ended if mode == "SameStep" else ():
                    assert_same(infos["final_obs"][env], expected_infos["final_obs"][env])
                num_ended, rewarded = num_ended + len(ended), rewarded or results[1].any()
        assert num_ended > 1 and (rewarded or game == "Pong")


@pytest.mark.parametrize("backend", ["auto", "python"])
def test_a_game_goes_on_after_a_life_unless_it_restarts(backend):
    def play(**kwargs):
        """Returns the numbers of lives and of ended episodes after 60 steps that hit no ball."""
        name = "vecenv.atari:Atari/Breakout-v5"
        with vecenv.make(name, 2, 0, backend, **SAME_STEP, repeat_action_probability=0.0, **kwargs) as envs:
            envs.reset(seed=0)
            lives, num_ended = [], 0
            for _ in range(60):
                *_, terminated, _, infos = envs.step(np.array([1, 1]))
                lives, num_ended = infos["lives"].tolist(), num_ended + terminated.sum()
        return lives, num_ended

    assert play() == ([3, 3], 0)
    assert play(life_loss_info=True) == ([3, 3], 4)
    lives, num_ended = play(episodic_life=True)
    assert lives == [5, 5] and num_ended > 4


def test_a_seed_begins_a_new_game_after_a_lost_life():
    env = vecenv.make_single("vecenv.atari:Atari/Breakout-v5", life_loss_info=True)
    first, _ = env.reset(seed=3)
    terminated = False
    while not terminated:
        last, _, terminated, _, info = env.step(1)
    again, again_info = env.reset()
    assert_same(again, last)
    assert info["lives"] == again_info["lives"] == 4
    assert_same(env.reset(seed=3)[0], first)
    env.close()


def test_the_chosen_form_is_logged_without_a_warning_because_the_forms_are_equal(logged):
    name = "vecenv.atari:Atari/Pong-v5"
    with vecenv.make(name, 2, **SAME_STEP, life_loss_info=True) as envs:
        assert envs.num_workers == 0
    with vecenv.make(name, 2, 0, life_loss_info=True) as envs:  # NextStep
        assert not isinstance(envs.get_attr("spec")[0], str) and envs.get_attr("unwrapped")[0].render_mode is None
    (info, chosen), (warning, rejected) = logged()
    assert (info, warning) == ("INFO", "WARNING")
    assert "is stepped in C++; backend='python' gives single envs with equal spaces and rewards" in chosen
    assert "consists of single envs: ValueError: life_loss_info=True needs autoreset_mode='SameStep'" in rejected


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"backend": "python", "life_loss_info": True},
        {"backend": "python", "life_loss_info": True, "noop_max": 0, **SMALL},
    ],
    ids=str,
)
def test_both_forms_pass_the_conformance_suite(kwargs):
    kwargs = {"max_num_frames_per_episode": 40, **kwargs}
    assert len(check_vector_env(lambda: vecenv.make("vecenv.atari:Atari/Breakout-v5", 2, 0, **kwargs), max_steps=40))


def test_a_game_renders_at_the_speed_of_its_frames():
    env = vecenv.make_single("vecenv.atari:Atari/Pong-v5", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (210, 160, 3) and env.render().any()
    assert env.metadata["render_fps"] == 15
    env.close()


def test_without_ale_py_the_error_says_what_to_install(monkeypatch):
    module = importlib.import_module("vecenv.atari")
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(gym.error.DependencyNotInstalled, match=r"need ale-py: `pip install 'vecenv-ppo\[atari\]'`"):
        importlib.reload(module)
