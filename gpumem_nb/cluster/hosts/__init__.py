"""Other hosts: which are named, how each is reached over ssh, who stands in for the kernel there."""
