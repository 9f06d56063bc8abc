"""The HTTP front end: one set of handlers behind two doors, the lane and hypercorn.

    listen      binds, accepts, stops                    gate        bounds and names what reaches the application
    lane        HTTP/1.1 for the hot routes              quart_door  the hot routes for those the lane hands over
    handover    hypercorn for everything else            exchange    the request and the answer both doors speak of

quart, hypercorn and httptools are imported below this directory and nowhere else.
"""

from __future__ import annotations
