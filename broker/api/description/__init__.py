"""The API described to clients: openapi.json, asyncapi.json, and each error."""
