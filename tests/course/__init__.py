"""The course as a student takes it: on real ranks, with the answer key, and with wrong answers."""
