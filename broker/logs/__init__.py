"""Structured logs that no request ever waits for.

    logger.info("topic opened", extra={"topic": "orders:paid"})
      │  the caller's thread: a line is made, and put into a bounded queue or dropped and counted
      └─ one daemon thread writes lines to standard output, however slow, full or closed that is

Every floor logs with the standard library alone; what is in ``extra`` becomes the line's fields.
"""

from broker.logs.context import request_id
from broker.logs.setup import LogCounters, Logs, counters, setup_logs

__all__ = ["LogCounters", "Logs", "counters", "request_id", "setup_logs"]
