"""Which code of a pass runs, by line and by condition, and what its source refers to."""
