"""Training steps of models in stages, for what runs them on many ranks: pipelines and data parallelism."""
