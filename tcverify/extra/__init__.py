"""What tcverify knows of other systems: each package here needs more than the core does, or looks into private parts."""
