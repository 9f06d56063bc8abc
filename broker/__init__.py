"""The daemon: configuration, wiring, HTTP front end, metrics and logs."""
