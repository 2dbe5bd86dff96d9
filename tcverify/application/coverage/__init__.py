"""Which code of a pass runs, line by line and condition by condition, and what its source names."""
