"""evaluate.py: `python -m ppo.evaluate`; what it does is in ppo/commands/evaluate.py."""

from ppo import commands
from ppo.commands.evaluate import command

if __name__ == "__main__":
    commands.main(command)
