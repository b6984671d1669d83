"""What is wrong with a session as it is, what mends it, and what that brings."""
