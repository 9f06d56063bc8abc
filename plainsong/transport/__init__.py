"""The client's network formats: HTTP requests of the library, WebSockets as bytes, and requests to other servers."""
