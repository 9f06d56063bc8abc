"""The answers of the HTTP API: each is one type, which the daemon builds, openapi.json describes and the client returns.

The types are dictionaries with the names of the JSON. ``broker.api.shapes`` derives their schemas.
"""
