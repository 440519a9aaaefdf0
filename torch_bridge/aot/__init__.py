"""Programs made ahead of time: a module traced for all ranks, exported as StableHLO, kept in files, and run with weights and states that stay on devices."""
