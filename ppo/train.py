"""`python -m ppo.train`; what it does is in ppo/cli/train.py."""

import sys
import types
from typing import Any

from ppo import launch
from ppo.api import train


class _Callable(types.ModuleType):
    """`ppo.train` is a function. Python puts this module in its place when it is imported: so it can be called too."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return train(*arguments, **options)


if __name__ == "__main__":
    launch.train()
else:
    sys.modules[__name__].__class__ = _Callable
