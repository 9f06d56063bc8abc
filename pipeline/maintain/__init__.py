"""The job ``maintain``: what may be removed from a topic's tables, planned from the daemon's word and the core's rules."""
