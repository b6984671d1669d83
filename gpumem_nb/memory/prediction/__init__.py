"""What a step would need under other settings: recorded small, scaled to any batch size, and replayed."""
