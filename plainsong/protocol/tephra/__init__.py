"""Tephra's transaction service as its clients know it: Thrift, calls and snapshots, byte for byte."""
