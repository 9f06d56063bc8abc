"""The benchmark: ``python -m bench`` compares the daemon with raw plyvel and a bare server, and reports ratios."""
