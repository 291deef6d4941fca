"""`python -m ppo.export`; what it does is in ppo/cli/export.py."""

from ppo import launch

if __name__ == "__main__":
    launch.export()
