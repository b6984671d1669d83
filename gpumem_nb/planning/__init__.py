"""What will happen if: decides what to ask the ranks for, and says what their answers mean."""
