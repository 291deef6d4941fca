"""Saves and restores the states of envs, in memory or in files that hold no code.

An env or wrapper defines its state with `get_state()`, which returns a plain value, and `set_state(state)`. The states
of Gymnasium's classic control and toy text, and of the most common wrappers, are known here. Any other env raises
`NotRestorable`. Plain values are None, bool, numbers, str, bytes, numpy arrays, scalars and `Generator`s, and lists,
tuples, dicts and deques of plain values. States hold them as JSON and arrays: `{"tuple": [...]}` stands for a tuple.
"""

from vecenv.state.envs import layers_of
from vecenv.state.files import dumps, load, loads, save

__all__ = ["dumps", "layers_of", "load", "loads", "save"]
