"""What is recorded, before anything is compiled: layouts and storages of tensors, the pending segment, fx graphs, and the source lines that they came from."""
