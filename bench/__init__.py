"""The benchmark: ``python -m bench`` measures the daemon beside raw plyvel and a bare server, and reports ratios."""
