"""HTTP: one set of handlers behind two listeners, the lane and hypercorn.

    server      binds, accepts, stops; hands what is not the lane's on         budgets     what bodies and answers may hold
    lane        HTTP/1.1 for messages, transactions and topics                 messages    Request, Answer, query, statuses
    quart_app   every other route, behind hypercorn                           wire        heads, chunks, compression
    websocket   streams                                                       hypercorn_server, hypercorn_patches   hypercorn, with our bounds

quart, hypercorn and httptools are imported below this directory and nowhere else.
"""

from __future__ import annotations
