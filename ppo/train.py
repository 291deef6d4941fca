"""train.py: `python -m ppo.train`; what it does is in ppo/commands/train.py."""

from ppo import commands
from ppo.commands.train import command

if __name__ == "__main__":
    commands.main(command)
