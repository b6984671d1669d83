"""Views in a notebook: panel, charts, progress and the output of cells."""
