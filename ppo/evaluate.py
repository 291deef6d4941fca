"""evaluate.py: `python -m ppo.evaluate`; what it does is in ppo/commands/evaluate.py."""

from ppo import launch

if __name__ == "__main__":
    launch.evaluate()
