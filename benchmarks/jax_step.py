"""One training step of the benchmark's Llama as hand-written JAX with optax: the peer that the others are compared to."""

from __future__ import annotations

from functools import partial

import jax
import llama_jax
import measure
import numpy as np
import optax


def make(weights: dict[str, np.ndarray]) -> measure.Variant:
    compilations = measure.count_jax_compilations()
    optimizer = optax.adamw(lambda step: measure.LEARNING_RATE / (1 + measure.DECAY * step), weight_decay=0.01)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, ids_BS):
        loss, grads = jax.value_and_grad(llama_jax.loss_fn)(params, ids_BS, measure.HEADS)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = llama_jax.from_torch(weights)
    state = jax.jit(optimizer.init)(params)
    before = compilations()  # making the arrays is no part of the step

    def dispatch(ids: np.ndarray) -> jax.Array:
        nonlocal params, state
        params, state, loss = train_step(params, state, ids.astype(np.int32))
        return loss

    versions = measure.versions_of(["jax", "jaxlib", "optax"])
    return measure.Variant(dispatch, float, versions, lambda: {"compilations": compilations() - before})


if __name__ == "__main__":
    measure.measure(make, measure.parser().parse_args())
