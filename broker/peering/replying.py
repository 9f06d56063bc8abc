"""A reply on its way out: in one frame, in pieces, or as its stream is made and its reader takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from broker.peering.bounds import INLINE_BYTES, PIECE_BYTES
from protocol.peering.frames import Frame

if TYPE_CHECKING:
    from broker.peering.answers import Reply
    from broker.peering.flow import Outflow
    from broker.peering.wire import Wire


async def send_reply(wire: Wire, number: int, reply: Reply, outflow: Outflow) -> None:
    """Sends all of it under ``number``, a stream as far as ``outflow`` has credit; the stream is closed in any case.

    Raises:
      Exception: what the stream raised, or why its reader takes no more. TypeError: the value cannot travel.
    """
    body = reply.body
    if not isinstance(body, bytes):
        try:
            wire.put(Frame.HEAD, number, reply.value, False)
            async for data in body:
                if data:
                    await outflow.send(data)
        finally:
            with trio.CancelScope(shield=True):
                await body.aclose()
        outflow.end()
        return
    if wire.is_full:
        await wire.room()  # until then it counts as under way: so answers that nobody reads are bounded, too
    if len(body) <= INLINE_BYTES:
        wire.put(Frame.ANSWER, number, reply.value, body)
        return
    wire.put(Frame.HEAD, number, reply.value, True)
    for start in range(0, len(body), PIECE_BYTES):
        wire.put(Frame.PIECE, number, body[start : start + PIECE_BYTES], False)
        await wire.room()
    wire.put(Frame.END, number)
