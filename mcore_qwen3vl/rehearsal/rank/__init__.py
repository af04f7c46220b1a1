"""What runs inside a rehearsed rank's process, on the simulated GPU."""
