"""One owner for each thing that changes: topics, and those who look after them."""
