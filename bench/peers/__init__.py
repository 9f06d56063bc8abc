"""The daemon compared with other brokers and stores: equal loads, equal durability, in turn, on one machine."""
