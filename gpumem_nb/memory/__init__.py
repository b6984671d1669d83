"""Where the bytes are: device readings, the virtual GPU, its stand-in, and the report. Pure torch."""
