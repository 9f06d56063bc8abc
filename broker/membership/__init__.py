"""The instances of a cluster according to ZooKeeper: which ones exist, and which topics each should own."""
