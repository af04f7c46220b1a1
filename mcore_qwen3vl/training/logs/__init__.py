"""What a run reports about itself."""
