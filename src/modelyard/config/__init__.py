"""One config decides everything: what the options are, and how they are resolved."""

from modelyard.config.resolve import load_config, resolve
from modelyard.config.schema import Config

__all__ = ["Config", "load_config", "resolve"]
