"""Tables in HBase, shared by several instances, through its Thrift gateway."""
