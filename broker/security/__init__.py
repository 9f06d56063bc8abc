"""Who asks, and what they may: identities, tokens, grants, quotas. The rules are pure; files and clocks stand apart."""
