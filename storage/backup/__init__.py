"""Backups: rows of a store as objects named by their hashes, the folder that keeps them, and the cut they are read from."""
