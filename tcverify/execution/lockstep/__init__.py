"""All ranks in one process, one after the other or stacked."""
