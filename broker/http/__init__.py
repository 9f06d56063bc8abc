"""HTTP: one set of handlers, over HTTP/1.1 (ours), WebSockets (ours) and HTTP/2 (hypercorn's).

    server        binds, accepts, stops                      messages          Request, Answer, query, statuses
    reactor       waits for all sockets                      handlers          handlers' types; requests that wait
    connection    a socket and its state                     route             the declaration of a route
    http1         HTTP/1.1: requests in sequence             quart_app         all routes as an application
    heads         the route and framing of a request         gate              access to the application; bounds
    intake        request bodies: bounded, timed             asgi              its requests over HTTP/1.1
    wire          answers: heads, chunks, compression        http2             its requests over HTTP/2
    websocket     streams                                    budgets           memory limits of bodies and answers

quart, hypercorn and httptools are imported only in this package.
"""

from __future__ import annotations
