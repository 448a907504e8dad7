"""The text side of a request: ids to text as they come, and stop strings."""
