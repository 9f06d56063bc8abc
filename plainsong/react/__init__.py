"""Reacts to messages without a consumer having to be written: one at a time, in order, each tried until it is done."""
