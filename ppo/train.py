"""`python -m ppo.train`, the former name of `ppo train`. The next version removes it."""

import sys

import ppo
from ppo.__main__ import main

if __name__ == "__main__":
    print("warning: `python -m ppo.train` is deprecated; use `ppo train` or `python -m ppo train`", file=sys.stderr)
    main(["train", *sys.argv[1:]])
else:
    # Importing a submodule rebinds its name in the package, but `ppo.train` must remain the function.
    sys.modules[__name__] = ppo.train  # type: ignore[assignment]
