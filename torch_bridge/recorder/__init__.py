"""xla tensors and how their ops are recorded: dispatch, rules of single ops, shape inference, checks of arguments, the autograd engine."""
