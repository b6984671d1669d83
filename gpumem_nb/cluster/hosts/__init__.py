"""Other hosts: their names, how each is reached over ssh, and the steward that acts for the kernel there."""
