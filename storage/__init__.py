"""Message, payload and metadata tables behind one protocol, and the stores that keep it."""
