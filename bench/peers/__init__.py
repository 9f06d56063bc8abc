"""The daemon beside other brokers and stores: the same loads at the same durability, in turns, on one machine."""
