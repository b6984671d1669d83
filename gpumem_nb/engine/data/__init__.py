"""Where a rank's samples come from: what somebody handed over as data, in which order, and who fetches it."""
