"""The job `replay`: publishes archived messages again, in order, each once, with their first ids as attributes."""
