"""What is in a YAML file: read, completed, checked."""
