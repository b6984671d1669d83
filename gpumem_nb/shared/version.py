"""The toolkit's version, for what must know it without importing the face."""

__version__ = "0.1.0"
