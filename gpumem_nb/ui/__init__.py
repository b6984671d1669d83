"""What a notebook shows: panel, charts, progress and the output of cells."""
