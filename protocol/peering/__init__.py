"""What instances and front ends of one service say to each other, as bytes: frames, and the values in them."""
