"""
Writing your own mask
=====================

A mask is a comparison of index expressions, so a new one is usually one line. This tutorial writes masks from the four indices,
from data, from text and from an existing ``mask_mod``, shows what makes a mask fast, and registers a mask under a name.
"""

import torch

import flexmask
from flexmask import b, causal, from_mask_mod, h, kv, parse, q, table, where
from flexmask.registry import named
from flexmask.testing import assert_equivalent

# %%
# Four indices
# ------------
# ``b`` is the sequence, ``h`` the head, ``q`` the position of the query and ``kv`` the position of the key. Comparisons of
# them, with integer arithmetic, are masks. ``&``, ``|``, ``^``, ``-`` (and not) and ``~`` compose masks.

near = abs(q - kv) <= 3
even = kv % 2 == 0
mask = (near | even) & causal()
print(mask)
mask.plot(16)

# %%
# Python's ``and``, ``or``, ``not`` and chained comparisons cannot be overloaded. They are an error that says what to write:

try:
    mask = 0 <= q - kv < 4
except TypeError as error:
    print(error)

# %%
# Data
# ----
# ``table`` looks data up by index: lists, NumPy arrays or tensors of integers or truth values. Here each token belongs to a
# speaker; a token attends to all earlier tokens of its own speaker and to the last 2 tokens of anyone. ``named`` gives a part
# of the mask words, which pictures, explanations and errors use. A tensor has its name from ``table(tensor, name="speaker")``.

speaker = table([0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0])
dialog = (kv <= q) & ((speaker[q] == speaker[kv]).named("same speaker") | (q - kv <= 2).named("just said"))
dialog.plot(12, why=True, tokens=[f"{'AB'[who]}{place}" for place, who in enumerate([0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0])])
print(flexmask.explain(dialog, 12, cell=(7, 2)))  # the last lines say why query 7 does not attend to key 2

# %%
# With a batch the data has the batch as its first axis, ``[B, length]``, and is looked up with ``b``. Sizes that follow from
# data need not be given: this mask has two sequences. A table is no mask, also one of truth values: compare it, here with 1.

is_system = torch.tensor([[True, True, False, False], [True, False, False, False]])
mask = (kv <= q) & ((q - kv < 2) | (table(is_system)[b, kv] == 1))  # the last 2 tokens, and the tokens of the system
print(mask.dense(4).shape)

# %%
# Choices
# -------
# ``where`` picks one of two masks, or of two index expressions. Here the first two heads are causal and the others have a
# window:

by_head = where(h < 2, causal(), (kv <= q) & (q - kv < 3))
by_head.plot_panels(8, head=[0, 2])

# %%
# Text and parameters
# -------------------
# ``parse`` reads the same language from text, for configuration files and the command line. It evaluates no code. Unknown names
# are parameters to bind later; a module takes their values in each call.

text = "causal & (abs(q - kv) <= reach)"
mask = parse(text)
print(mask.params, "->", mask.bind(reach=2))
mask.bind(reach=2).plot(12)

# %%
# What makes a mask fast?
# -----------------------
# flexmask solves each comparison for the key. ``q - kv < 4`` becomes the interval ``kv > q - 4``. A comparison that can be
# solved like this is *separable* in q and kv, and a row of the mask is then a few key intervals, whatever the length.
# ``explain`` says which comparisons are not:

print(flexmask.explain((q - kv < 4) & (kv <= q) & ((q - kv) % 3 == 0), 1024))

# %%
# ``(q - kv) % 3 == 0`` depends on both indices at once. It is exact as well, but evaluated cell by cell, in the blocks that the
# other conditions leave open. So give such a condition a separable partner that limits where it matters, here the window.
#
# From a mask_mod
# ---------------
# ``from_mask_mod`` calls a ``mask_mod`` once with symbolic indices and returns the mask, with the names of known masks where it
# finds them.

window = 256


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window)


print(from_mask_mod(mask_mod))

# %%
# An operation that has no expression is kept as an opaque call: exact, but evaluated cell by cell. ``strict=True`` makes it an
# error.

noise = torch.rand(64)


def opaque(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (torch.sin(noise[kv_idx]) < 0.5)


print(from_mask_mod(opaque))

# %%
# A named mask
# ------------
# ``@named`` registers a function that returns a mask. It then prints under its name, and text knows it. A package does the same
# with an entry point, and its masks appear in ``flexmask list`` and ``flexmask.masks``. ``flexmask.registry.per_token`` looks
# up data of each token with and without a batch axis, as ``document`` does.


@named
def every(step: int):
    """Queries attend to every ``step``-th key up to their own position.

    Predicate: ``(kv <= q) & (kv % step == 0)``
    """
    return (kv <= q) & (kv % step == 0)


mask = parse("every(4) | sliding_window(size=2)")
print(mask)
mask.plot(16, why=False)

# %%
# A test
# ------
# A mask can be what its author wrote and still not what they meant. Only a reference that is written in another way shows that.
# ``assert_equivalent`` compares the mask with it, in every lowering, and attention with its gradients.

assert_equivalent(mask, 16, reference=lambda b, h, q, kv: (kv <= q) & ((kv % 4 == 0) | (q - kv < 2)))
try:
    assert_equivalent(mask, 6, reference=lambda b, h, q, kv: (kv <= q) & ((kv % 4 == 0) | (q - kv <= 2)))
except AssertionError as error:
    print(error)
