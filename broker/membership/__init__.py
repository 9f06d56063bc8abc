"""The instances of a cluster, as ZooKeeper has them: who is there, and which topics each should own."""
