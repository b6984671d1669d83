"""Where a rank's samples come from: the data that was handed over, its order, and the processes that fetch it."""
