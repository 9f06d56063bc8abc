"""What messages, ids, requests and answers are, and the rules: no clock, disk, socket or event loop."""
