r"""An env with image observations: a paddle must catch a falling ball.

Train it:  python -m ppo train --env examples.catch:Catch-v0 --num-envs 32 --num-steps 16 --minibatch-size 128 \
               --epochs 4 --gamma 0.95 --learning-rate 1e-3 --total-steps 40000 --logdir runs
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np

SIZE, BALL, PADDLE, FALL, MOVE = 84, 6, 16, 6, 6  # pixels; FALL and MOVE are per step


class Catch(gym.Env):
    """Observations: `uint8[84, 84, 1]`. Actions: left, stay, right. Reward: 1 for a catch, -1 for a miss."""

    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._ball = [0, int(self.np_random.integers(SIZE - BALL + 1))]
        self._paddle = int(self.np_random.integers(SIZE - PADDLE + 1))
        return self._draw(), {}

    def step(self, action):
        self._paddle = int(np.clip(self._paddle + MOVE * (int(action) - 1), 0, SIZE - PADDLE))
        self._ball[0] += FALL
        arrived = self._ball[0] + BALL >= SIZE - 2
        caught = self._paddle - BALL < self._ball[1] < self._paddle + PADDLE
        reward = (1.0 if caught else -1.0) if arrived else 0.0
        return self._draw(), reward, arrived, False, {}

    def _draw(self):
        image = np.zeros((SIZE, SIZE, 1), np.uint8)
        row, column = self._ball
        image[row : row + BALL, column : column + BALL] = 255
        image[-3:, self._paddle : self._paddle + PADDLE] = 128
        return image


gym.register("Catch-v0", entry_point=Catch)
