"""Before any rank exists: building Horovod, and checking the environment."""
