"""plot.py: `python -m ppo.plot`; what it does is in ppo/commands/plot.py."""

from ppo import launch

if __name__ == "__main__":
    launch.plot()
