"""The transaction manager: Tephra's rules and their hardenings, without clock, disk or event loop."""
