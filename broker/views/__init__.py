"""All routes that are not hot: small functions from a Quart request to an answer."""
