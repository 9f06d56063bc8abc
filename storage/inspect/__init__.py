"""What a stored row says, what a stopped store holds, and how it is opened without changing it."""
