"""The plain script that trains as a session does, put together from templates that read like it."""
