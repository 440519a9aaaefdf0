"""A toy Medusa model: what it says after a text, what greedy decoding makes of it, and what its heads guess."""

from __future__ import annotations

import random

from nxd_jax.utils.medusa_utils import TOPK

VOCABULARY = 12


def best_after(tokens: list[int]) -> list[int]:
    """An order of the vocabulary, best first, that depends on the whole text. Token 0 is as frequent as others."""
    return random.Random(str(tokens)).sample(range(VOCABULARY), TOPK)


def greedy(prompt: list[int], count: int, ends: tuple[int, ...] = ()) -> list[int]:
    """The prompt and at most so many tokens after it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(best_after(tokens)[0])
        if tokens[-1] in ends:
            break
    return tokens


def heads_after(tokens: list[int], heads: int, hit: float) -> list[list[int]]:
    """Guesses of the tokens after the next one: `hit` of the time the right one is among them."""
    draw = random.Random(f"heads {tokens}")
    right = greedy(tokens, heads + 1)[len(tokens) + 1 :]
    found = [draw.sample(range(VOCABULARY), TOPK) for _ in range(heads)]
    for guesses, token in zip(found, right, strict=True):
        if draw.random() < hit:
            spot = draw.choice([0, 0, 0, 1, 2])
            other = guesses.index(token) if token in guesses else spot
            guesses[other], guesses[spot] = guesses[spot], token
    return found


def grown(seed: int) -> list[list[int]]:
    """A tree of 30 nodes, root included, grown at random; its nodes in no order."""
    draw = random.Random(seed)
    paths: list[list[int]] = [[]]
    while len(paths) < 30:
        path = [*draw.choice(paths), draw.randrange(TOPK)]
        if len(path) <= 5 and path not in paths:
            paths.append(path)
    nodes = paths[1:]
    draw.shuffle(nodes)
    return nodes
