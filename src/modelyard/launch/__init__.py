"""Starts the processes of a cluster, and stops them.

``modelyard.launch`` is this package and the function that launches: the package can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """`modelyard.launch.local.launch`."""
        from modelyard.launch.local import launch

        launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
