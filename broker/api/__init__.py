"""The routes of the HTTP API: their declarations, and the handlers that answer them."""
