"""Training steps of models in stages, for schedules of pipeline parallelism."""
