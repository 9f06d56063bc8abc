"""What goes over the network: requests as the HTTP library takes them, WebSockets as bytes, and requests to other servers."""
