"""HTTP: one set of handlers, over HTTP/1.1 (ours), WebSockets (ours) and HTTP/2 (hypercorn's).

    server        binds, accepts, stops                      messages          Request, Answer, query, statuses
    http1         HTTP/1.1: one request after the other      quart_app         every route as an application
    connection    the socket, and what it is doing           gate              who passes to the application; bounds
    heads         which request this is                      asgi              its requests over HTTP/1.1
    intake        bodies in: done, refused, late             hypercorn_server  its requests over HTTP/2
    wire          answers out: heads, chunks, compression    http2             what hypercorn's HTTP/2 lacks
    websocket     streams                                    budgets           what bodies and answers may hold

quart, hypercorn and httptools are imported below this directory and nowhere else.
"""

from __future__ import annotations
