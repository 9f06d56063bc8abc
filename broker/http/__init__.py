"""HTTP: one set of handlers, over HTTP/1.1 (ours), WebSockets (ours) and HTTP/2 (hypercorn's).

    server        binds, accepts, stops                      messages          Request, Answer, query, statuses
    http1         HTTP/1.1: requests in sequence             quart_app         all routes as an application
    connection    the socket and its state                   gate              access to the application; bounds
    heads         the route and framing of a request         asgi              its requests over HTTP/1.1
    intake        request bodies: bounded, timed             hypercorn_server  its requests over HTTP/2
    wire          answers: heads, chunks, compression        http2             hypercorn's HTTP/2, extended
    websocket     streams                                    budgets           memory limits of bodies and answers

quart, hypercorn and httptools are imported only in this package.
"""

from __future__ import annotations
