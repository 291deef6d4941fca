"""`python -m ppo.plot`; what it does is in ppo/cli/plot.py."""

from ppo import launch

if __name__ == "__main__":
    launch.plot()
