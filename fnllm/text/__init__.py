"""The text of a request: incremental detokenization and stop strings."""
