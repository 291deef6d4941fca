"""What `get_state()` takes of envs, how `set_state()` puts it back, and files of it.

`files` saves and loads, `capture` takes, `restore` puts back, `saved_rows` does both with an env's row of memory;
`anatomy` and `arrays` know what things are made of.
"""

from vecenv.state.files import load, save

__all__ = ["load", "save"]
