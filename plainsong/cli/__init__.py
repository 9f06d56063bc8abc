"""The command line ``plainsong``; its commands come from the entry-point group ``plainsong.commands``."""
