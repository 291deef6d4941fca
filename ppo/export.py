"""export.py: `python -m ppo.export`; what it does is in ppo/commands/export.py."""

from ppo.commands.export import main

if __name__ == "__main__":
    main()
