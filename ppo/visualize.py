"""visualize.py: `python -m ppo.visualize`; what it does is in ppo/commands/visualize.py."""

from ppo.commands.visualize import main

if __name__ == "__main__":
    main()
