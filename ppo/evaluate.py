"""evaluate.py: `python -m ppo.evaluate`; what it does is in ppo/commands/evaluate.py."""

from ppo.commands.evaluate import main

if __name__ == "__main__":
    main()
