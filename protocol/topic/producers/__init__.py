"""Producers: who they are, what they have stored, and what that means for the next thing they send."""
