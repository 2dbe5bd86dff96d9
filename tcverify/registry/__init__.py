"""What options name: passes, strategies, checks, executors, domains, reports. Importing it imports none of them, nor torch."""
