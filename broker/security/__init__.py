"""Authentication and authorization: identities, tokens, grants, quotas. The rules are free of I/O and clocks."""
