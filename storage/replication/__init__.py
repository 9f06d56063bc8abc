"""The commit log of a store in an object store: segments, epochs and seals."""
