"""The source of a rank's samples: the data that was handed over, its order, and the processes that fetch it."""
