"""transformers' `generate()` on xla: what grows with each token stays on the CPU, and the model's programs have fixed shapes."""
