"""The wire: one HTTP request out, one whole answer back, on kept connections. The home of httpcore2."""
