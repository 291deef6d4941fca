"""A griffe extension for the API reference, which corrects what griffe cannot read from source files."""

import inspect
from typing import Any

import griffe

import ppo


class Imported(griffe.Extension):
    """Corrects `ppo.Config`."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.path != "ppo":
            return
        # The docstring of Config lists the settings, whose help texts are metadata of the fields.
        config = pkg["config.Config"]
        config.docstring.value = inspect.cleandoc(ppo.Config.__doc__ or "")
        for field in config.attributes.values():
            if str(field.annotation).startswith("Annotated["):
                field.annotation = field.annotation.slice.elements[0]
