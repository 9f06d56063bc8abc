"""The settings of the daemon: their names, defaults and bounds, and where each value came from.

A value may come from four places; a later one wins:

    the default in its class < the TOML file < the environment < the command line

The settings are read once, when a command starts, and checked together before anything is opened. After that no code
reads a file or the environment: ``broker.main`` passes each section to what needs it.
"""

from __future__ import annotations

from broker.config.config import Config, ConfigError, Problem, Setting, every_setting
from broker.config.load import LoadedConfig, load_config

__all__ = ["Config", "ConfigError", "LoadedConfig", "Problem", "Setting", "every_setting", "load_config"]
