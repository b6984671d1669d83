"""Forecasts of a step under other settings: recorded small, scaled to any batch size, and replayed."""
