"""What the lessons show: models of the hardware, measurements on it, and figures of both."""
