"""What users import to publish and to poll; it knows ``protocol`` and never the daemon."""

__version__ = "0.1.0"
