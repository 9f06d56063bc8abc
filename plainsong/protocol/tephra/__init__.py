"""The interface of Tephra's transaction service: Thrift, calls and snapshots, byte for byte."""
