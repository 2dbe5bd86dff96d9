"""What options name: passes, strategies, checks, executors, domains, reports. Importing this package imports neither
these nor torch."""
