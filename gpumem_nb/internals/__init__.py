"""Private and undocumented parts of other packages: one module for each package, and no other module touches them.

Each says what it uses and why, and with which versions that was checked (``CHECKED_WITH``).
``tests/unit/test_internals.py`` names what moved when a new version moves something.
"""
