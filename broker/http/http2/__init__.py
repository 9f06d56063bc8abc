"""HTTP/2: hypercorn's protocol (0.18) between our connections and the application.

``server`` has the connections: their reads, sends and time-outs. ``protocol`` is hypercorn's, with patches. Each patch
is a file, named after its cause: a bug or a missing bound of hypercorn or h2. ``tests/broker/test_http2_patches.py``
shows that each is still needed: a test that fails there says which file can go.
"""

from __future__ import annotations
