"""Modules that are recorded once and played again (`torch_bridge.optimize`): recordings, their guards' surroundings, and the backward pass."""
