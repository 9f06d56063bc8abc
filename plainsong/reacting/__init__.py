"""Reacting to messages without writing a consumer: one at a time, in order, each tried until it is done."""
