"""`python -m ppo.visualize`; what it does is in ppo/cli/visualize.py."""

from ppo import launch

if __name__ == "__main__":
    launch.visualize()
