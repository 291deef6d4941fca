"""`python -m ppo.evaluate`; what it does is in ppo/cli/evaluate.py."""

from ppo import launch

if __name__ == "__main__":
    launch.evaluate()
