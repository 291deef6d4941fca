"""plot.py: `python -m ppo.plot`; what it does is in ppo/commands/plot.py."""

from ppo.commands.plot import main

if __name__ == "__main__":
    main()
