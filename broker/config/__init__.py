"""The settings of the daemon: their names, defaults and bounds, and where each value came from.

A value is looked for in four places; the later wins:

    the default in its class < the TOML file < the environment < the command line

Read once, at the door, and checked together before anything is opened. After that nobody reads a file
or the environment: ``broker.main`` hands each section to the one who needs it.
"""

from __future__ import annotations

from broker.config.config import Config, ConfigError, Problem, Setting, every_setting
from broker.config.load import LoadedConfig, load_config

__all__ = ["Config", "ConfigError", "LoadedConfig", "Problem", "Setting", "every_setting", "load_config"]
